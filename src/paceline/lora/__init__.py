"""LoRA: low-rank adapters of the policy's linear maps, merged into the weights that rollout and learning read.

shape       which linear maps are adapted, and how large the adapters are
adapters    the adapters of a policy; merging them into its weights, in place
base        the weights before any adapter, kept bit by bit
matmul      the gradients of the adapters, through the merged weights
files       adapters in PEFT's form
start       the adapters that a run goes on with
memory      bytes
"""
