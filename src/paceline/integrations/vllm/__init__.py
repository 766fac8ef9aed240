"""Paceline inside vLLM, by vLLM's own hooks: docs/vllm.md."""
