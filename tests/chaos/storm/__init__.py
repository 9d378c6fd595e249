"""Everything at once: a load of all dialects while every part fails, and the account of it.

`python -m tests.chaos.storm` (`make chaos`) runs it; `docs/chaos.md` lists its checks.
"""
