"""OpenHands' default agent, from its SDK, in the working directory: openhands_agent.py URL MODEL TASK."""

import sys
from pathlib import Path

from openhands.sdk import LLM, Conversation
from openhands.tools.preset.default import get_default_agent

url, model, task = sys.argv[1:]
llm = LLM(model=f"openai/{model}", base_url=url, api_key="x", usage_id="agent")
conversation = Conversation(agent=get_default_agent(llm, cli_mode=True), workspace=str(Path.cwd()))
conversation.send_message(task)
conversation.run()
