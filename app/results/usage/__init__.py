"""Usage: the ledger of tokens and engine time by team, token, model and day, and its reports."""
