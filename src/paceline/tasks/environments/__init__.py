"""Conversations: environments and tools that answer what the policy writes, turn by turn.

protocol    what an environment is, and what its `step` may return
tools       Python functions as tools: schema, call, result as text
calls       tool calls in what a model writes, by family
toolbox     an environment made of tools, or of an object whose methods are tools
mcp         tools of MCP servers
chat        observations as tokens, in the model's own chat template
pool        the processes in which all of it runs, with time limits
conversations   the driver's side: turns in, observations out, recorded
"""
