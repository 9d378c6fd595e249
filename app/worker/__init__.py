"""Workers: claim results, execute them under a lease, store their end."""
