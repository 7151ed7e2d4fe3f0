# /// script
# requires-python = ">=3.11"
# dependencies = ["infinity-emb[server,torch]==0.0.78", "torch==2.15.*"]
# ///
"""Serves with infinity's own server and its torch backend."""

import sys

import uvicorn
from infinity_emb import EngineArgs
from infinity_emb.infinity_server import create_server

MODEL, PORT, BATCH, _ = sys.argv[1:]
engine = EngineArgs(
    model_name_or_path=MODEL,
    served_model_name="model",
    batch_size=int(BATCH),
    engine="torch",
    device="cpu",
    dtype="float32",
    bettertransformer=False,
)
uvicorn.run(create_server(engine_args_list=[engine]), host="127.0.0.1", port=int(PORT), log_level="warning")
