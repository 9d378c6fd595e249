"""A hostile team with a valid key beside a polite one: `make attack`, and a short run in the suite."""
