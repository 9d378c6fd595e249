"""The installed service: its launcher, and `root`, the files of the repository that it reads."""
