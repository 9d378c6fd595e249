"""Foundations without knowledge of the domain: settings, errors, database, logs."""
