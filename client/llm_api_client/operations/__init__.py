"""The calls of the API, each written once for both clients (llm_api_client/steps.py)."""
