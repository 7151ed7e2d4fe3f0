"""Open WebUI's page in Chromium, with a service that reads images in chats."""

import subprocess
from pathlib import Path

from checks import MODEL
from open_webui import serving

# Titles, tags and follow-up questions are requests of the page's own, which the small model of the test cannot answer.
# Nor does its template know tools, which the page otherwise sends with each chat.
SETTINGS = {
    **dict.fromkeys(("ENABLE_TITLE_GENERATION", "ENABLE_TAGS_GENERATION", "ENABLE_FOLLOW_UP_GENERATION"), "False"),
    "DEFAULT_MODEL_PARAMS": '{"function_calling": "legacy"}',
}

with serving(**SETTINGS) as url:
    subprocess.run(["node", Path(__file__).with_name("open_webui_page.mjs"), url, MODEL], check=True, timeout=400)
