"""What settings of other trainers and engines are called here: one table, which did-you-mean, `paceline settings WORD`,
`Engine.generate` and the pages docs/from-trl.md and docs/from-verl.md share."""

from __future__ import annotations

from typing import NamedTuple

TRL = "TRL"
VERL = "verl"
ENGINES = "vLLM and transformers"


class ForeignName(NamedTuple):
    library: str
    name: str
    here: str
    """The setting, or words in its place: a setting with its value, an argument, or nothing where there is nothing to
    set."""
    note: str = ""
    """What differs, or why there is nothing to set."""


def _names(library: str, rows: list[tuple[str, str, str]]) -> list[ForeignName]:
    return [ForeignName(library, *row) for row in rows]


FOREIGN = [
    *_names(
        TRL,
        [
            ("learning_rate", "learn.lr", ""),
            ("beta", "learn.kl_coef", ""),
            ("num_generations", "rollout.samples", ""),
            ("per_device_train_batch_size", "rollout.prompts", "prompts, not completions, of a step on all devices"),
            ("generation_batch_size", "rollout.prompts", "prompts, not completions: divide by num_generations"),
            ("gradient_accumulation_steps", "learn.micro_tokens", "a step is cut into passes of so many tokens"),
            ("steps_per_generation", "learn.minibatches", "updates per pass over a step's completions"),
            ("num_iterations", "learn.epochs", ""),
            ("max_steps", "steps", ""),
            ("num_train_epochs", "steps", "epochs x prompts of the data / rollout.prompts"),
            ("max_prompt_length", "task.max_prompt_tokens", ""),
            ("max_completion_length", "rollout.max_tokens", ""),
            ("temperature", "rollout.temperature", ""),
            ("top_p", "rollout.top_p", ""),
            ("top_k", "rollout.top_k", ""),
            ("min_p", "rollout.min_p", ""),
            ("epsilon", "learn.clip_low", "and learn.clip_high"),
            ("epsilon_high", "learn.clip_high", ""),
            ("loss_type", "learn.algorithm", "grpo, dr_grpo or dapo; token weights alone are learn.aggregate"),
            ("scale_rewards", "learn.algorithm", "none is dr_grpo"),
            ("reward_funcs", "reward.functions", "in Python, Trainer(reward=...)"),
            ("reward_weights", "reward.functions", "each function has a weight"),
            ("tools", "environment.tools", "[file.py:function]"),
            ("environment_factory", "environment.name", "file.py:class"),
            ("max_tool_calling_iterations", "environment.max_turns", "turns: one more than iterations"),
            ("mask_truncated_completions", "learn.overlong_buffer", "long completions get a penalty instead"),
            ("vllm_importance_sampling_correction", "learn.importance_sampling_cap", "null turns it off"),
            ("vllm_importance_sampling_cap", "learn.importance_sampling_cap", ""),
            ("vllm_importance_sampling_clip_max", "learn.importance_sampling_cap", ""),
            ("warmup_steps", "learn.warmup_steps", ""),
            ("lr_scheduler_type", "learn.lr_scheduler", ""),
            ("max_grad_norm", "learn.max_grad_norm", ""),
            ("weight_decay", "learn.weight_decay", ""),
            ("adam_beta1", "learn.betas", "a list of both"),
            ("adam_beta2", "learn.betas", "a list of both"),
            ("adam_epsilon", "learn.eps", ""),
            ("gradient_checkpointing", "learn.activation_checkpointing", ""),
            ("bf16", "model.dtype", "bfloat16 is the default on a GPU"),
            ("model_name_or_path", "model.path", ""),
            ("dataset_name", "task.name", "hub:ID"),
            ("output_dir", "run_dir", ""),
            ("save_steps", "checkpoint.every", ""),
            ("save_total_limit", "checkpoint.keep", ""),
            ("resume_from_checkpoint", "--resume RUN", ""),
            ("report_to", "log.tensorboard", "or log.wandb, log.trackio"),
            ("log_completions", "log.samples", "completions per step in RUN/samples.jsonl"),
            ("use_vllm", "", "the rollout engine is built in and shares the learner's weights"),
            ("vllm_mode", "", "the rollout engine is built in and shares the learner's weights"),
            ("vllm_gpu_memory_utilization", "rollout.kv_memory_gb", "in GB; null takes what is left"),
            ("shuffle_dataset", "task.shuffle", ""),
        ],
    ),
    *_names(
        VERL,
        [
            ("data.train_files", "task.name", ""),
            ("data.train_batch_size", "rollout.prompts", ""),
            ("data.gen_batch_size", "rollout.prompts", ""),
            ("data.max_prompt_length", "task.max_prompt_tokens", ""),
            ("data.max_response_length", "rollout.max_tokens", ""),
            ("data.prompt_key", "task.prompt_column", ""),
            ("data.shuffle", "task.shuffle", ""),
            ("data.seed", "seed", ""),
            ("actor_rollout_ref.model.path", "model.path", ""),
            ("actor_rollout_ref.model.enable_gradient_checkpointing", "learn.activation_checkpointing", ""),
            ("actor_rollout_ref.model.use_remove_padding", "", "there is no padding"),
            ("actor_rollout_ref.actor.optim.lr", "learn.lr", ""),
            ("actor_rollout_ref.actor.optim.lr_warmup_steps", "learn.warmup_steps", ""),
            ("actor_rollout_ref.actor.optim.warmup_style", "learn.lr_scheduler", ""),
            ("actor_rollout_ref.actor.optim.lr_scheduler_type", "learn.lr_scheduler", ""),
            ("actor_rollout_ref.actor.optim.min_lr_ratio", "learn.min_lr_ratio", ""),
            ("actor_rollout_ref.actor.optim.weight_decay", "learn.weight_decay", ""),
            ("actor_rollout_ref.actor.optim.betas", "learn.betas", ""),
            (
                "actor_rollout_ref.actor.ppo_mini_batch_size",
                "learn.minibatches",
                "updates per pass, not prompts of one",
            ),
            ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "learn.micro_tokens", "in tokens"),
            ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "learn.micro_tokens", ""),
            ("actor_rollout_ref.actor.use_dynamic_bsz", "", "passes are always cut by tokens: learn.micro_tokens"),
            ("actor_rollout_ref.actor.ppo_epochs", "learn.epochs", ""),
            ("actor_rollout_ref.actor.clip_ratio", "learn.clip_low", "and learn.clip_high"),
            ("actor_rollout_ref.actor.clip_ratio_low", "learn.clip_low", ""),
            ("actor_rollout_ref.actor.clip_ratio_high", "learn.clip_high", ""),
            ("actor_rollout_ref.actor.loss_agg_mode", "learn.aggregate", "token-mean is token_mean"),
            ("actor_rollout_ref.actor.use_kl_loss", "learn.kl_coef", "0 is without"),
            ("actor_rollout_ref.actor.kl_loss_coef", "learn.kl_coef", ""),
            ("actor_rollout_ref.actor.kl_loss_type", "", "low_var_kl, which is k3, always"),
            ("actor_rollout_ref.actor.grad_clip", "learn.max_grad_norm", ""),
            ("actor_rollout_ref.actor.fsdp_config.param_offload", "", "weights stay on the device that decodes"),
            ("actor_rollout_ref.rollout.n", "rollout.samples", ""),
            ("actor_rollout_ref.rollout.temperature", "rollout.temperature", ""),
            ("actor_rollout_ref.rollout.top_p", "rollout.top_p", ""),
            ("actor_rollout_ref.rollout.top_k", "rollout.top_k", "0 keeps all, not -1"),
            ("actor_rollout_ref.rollout.name", "", "the rollout engine is built in"),
            (
                "actor_rollout_ref.rollout.gpu_memory_utilization",
                "rollout.kv_memory_gb",
                "in GB; null takes what is left",
            ),
            ("actor_rollout_ref.rollout.max_num_seqs", "rollout.max_batch", ""),
            ("actor_rollout_ref.rollout.max_num_batched_tokens", "rollout.prefill_tokens", ""),
            ("actor_rollout_ref.rollout.enforce_eager", "rollout.cuda_graphs", "the opposite"),
            (
                "actor_rollout_ref.rollout.tensor_model_parallel_size",
                "cluster.workers",
                "each worker has the whole policy",
            ),
            ("algorithm.adv_estimator", "learn.algorithm", ""),
            ("algorithm.norm_adv_by_std_in_grpo", "learn.algorithm", "false is dr_grpo"),
            ("algorithm.use_kl_in_reward", "learn.algorithm", "reinforce_pp has it in the reward"),
            ("actor_rollout_ref.rollout.multi_turn.max_assistant_turns", "environment.max_turns", ""),
            ("actor_rollout_ref.rollout.multi_turn.tool_config_path", "environment.tools", "[file.py:function]"),
            ("actor_rollout_ref.rollout.multi_turn.function_tool_path", "environment.tools", "[file.py:function]"),
            ("actor_rollout_ref.rollout.multi_turn.max_tool_response_length", "environment.max_chars", "characters"),
            ("algorithm.kl_ctrl.kl_coef", "learn.kl_coef", ""),
            ("algorithm.filter_groups.enable", "learn.dynamic_sampling", ""),
            ("algorithm.filter_groups.max_num_gen_batches", "learn.dynamic_sampling_rounds", ""),
            ("algorithm.rollout_correction.rollout_is_threshold", "learn.importance_sampling_cap", ""),
            ("reward_model.overlong_buffer.enable", "learn.overlong_buffer", "0 is without"),
            ("reward_model.overlong_buffer.len", "learn.overlong_buffer", ""),
            ("reward_model.overlong_buffer.penalty_factor", "learn.overlong_penalty", ""),
            ("custom_reward_function.path", "reward.functions", "[{function: file.py:compute_score}]"),
            ("custom_reward_function.name", "reward.functions", "[{function: file.py:compute_score}]"),
            ("trainer.total_training_steps", "steps", ""),
            ("trainer.total_epochs", "steps", "epochs x prompts of the data / rollout.prompts"),
            ("trainer.save_freq", "checkpoint.every", ""),
            ("trainer.max_actor_ckpt_to_keep", "checkpoint.keep", ""),
            ("trainer.default_local_dir", "run_dir", ""),
            ("trainer.experiment_name", "run_dir", ""),
            ("trainer.project_name", "log.wandb", ""),
            ("trainer.logger", "log.tensorboard", "or log.wandb, log.trackio"),
            ("trainer.n_gpus_per_node", "cluster.workers", "0 takes every GPU"),
            ("trainer.nnodes", "cluster.backend", "ray; cluster.workers counts over all machines"),
            ("trainer.resume_mode", "--resume RUN", ""),
        ],
    ),
    *_names(
        ENGINES,
        [
            ("max_new_tokens", "max_tokens", ""),
            ("max_length", "max_tokens", "without the prompt"),
            ("min_new_tokens", "min_tokens", ""),
            ("num_return_sequences", "samples", ""),
            ("n", "samples", ""),
            ("best_of", "samples", ""),
            ("do_sample", "temperature", "0 is greedy"),
            ("stop_strings", "stop", ""),
            ("stop_sequences", "stop", ""),
            ("eos_token_id", "stop_token_ids", ""),
            ("logprobs", "", "every completion has its logprobs"),
            ("max_num_seqs", "rollout.max_batch", ""),
            ("gpu_memory_utilization", "rollout.kv_memory_gb", "in GB; null takes what is left"),
            ("enforce_eager", "rollout.cuda_graphs", "the opposite"),
            ("num_speculative_tokens", "speculation.strategies", "the tuner chooses from a list"),
        ],
    ),
]
"""Names that a user of another library would try."""
GENERATE = ("max_tokens", "min_tokens", "samples", "temperature", "stop", "stop_token_ids")
"""Arguments of `Engine.generate` that rows of ENGINES name; as settings they are those of `rollout`."""


def plain_name(name: str) -> str:
    """As it would be written in a file: `--learning-rate` is learning_rate, Hydra's `+a.b` is a.b."""
    return name.lstrip("-+").replace("-", "_")


def find_foreign(name: str) -> ForeignName | None:
    """What a name means in another library: the whole of it, or a dotted one without its first parts."""
    name = plain_name(name)
    whole = (one for one in FOREIGN if one.name == name)
    ends = (one for one in FOREIGN if "." in name and one.name.endswith(f".{name}"))
    return next(whole, None) or next(ends, None)


def as_setting(one: ForeignName) -> str:
    """The setting's whole name, also for an argument of `Engine.generate`."""
    if one.here == "stop_token_ids":
        return "rollout.stop"
    return f"rollout.{one.here}" if one.here in GENERATE else one.here


def translate(name: str) -> str | None:
    """For a sentence about an unknown setting: what it is called here, if it is another library's."""
    one = find_foreign(name)
    if one is None:
        return None
    theirs = f"{one.library}'s '{one.name}'"
    if not one.here:
        return f"{theirs} has no counterpart here: {one.note}"
    return f"{theirs} is '{as_setting(one)}' here" + (f" ({one.note})" if one.note else "")


def markdown_table(library: str) -> str:
    """The names of one library as the docs have them."""
    rows = [f"| {library} | here | |", "|---|---|---|"]
    for one in FOREIGN:
        if one.library == library:
            here = f"`{one.here}`" if one.here else "–"
            rows.append(f"| `{one.name}` | {here} | {one.note} |")
    return "\n".join(rows)
