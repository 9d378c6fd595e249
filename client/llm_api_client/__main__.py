"""`python -m llm_api_client`: the command `llm-api`."""

import sys

from llm_api_client.cli.main import main

sys.exit(main())
