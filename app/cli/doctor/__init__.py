"""`python -m app doctor`: checks of a deployment, and a remedy for each problem."""
