"""Evaluation: always the same prompts with the same noise, so that two checkpoints are compared on equal dice.

prompts     which prompts, and the requests that are made of them
evaluator   has them answered by the workers of a run and rewarded, and gives the scores
scores      what the answers to each prompt got; means, pass@k and best@k with their exact estimators
paired      the difference between two evaluations, with its standard error and interval
metrics     the scores under verl's names
records     evaluations in the run directory: rows of evaluations.jsonl
during_run  when a run is evaluated, and which checkpoint is its best
"""
