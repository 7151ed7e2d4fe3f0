"""A service that needs a key: the run reads APIKeys from the files, as a gateway reads them in a cluster."""

from pathlib import Path

import openai
import pytest
from tests.cli.local.running import Running, build_service
from tests.gateway.keys import make_api_key, make_key

KEY, OTHER = make_key("default"), make_key("default", 2)


def test_only_a_key_in_the_files_is_accepted(tmp_path: Path, models: Path) -> None:
    service = build_service(access={"mode": "Required"})
    keys = (make_api_key("default"), make_api_key("default", "other", OTHER, services=["nothing"]))
    with Running(tmp_path / "run", models, service, *keys) as run:
        run.wait_ready()

        def complete(key: str) -> int:
            client = openai.OpenAI(base_url=f"{run.root}/v1", api_key=key, max_retries=0)
            answer = client.completions.create(model="chat", prompt="a", max_tokens=1)
            assert answer.usage is not None
            return answer.usage.completion_tokens

        assert complete(KEY) == 1
        with pytest.raises(openai.AuthenticationError, match="unknown or was revoked"):
            complete(make_key("default", 3))
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            complete(OTHER)
        assert run.http.get("/v1/models").status_code == 401
        assert run.http.get("/v1/models", headers={"x-api-key": OTHER}).json()["data"] == []
        (model,) = run.http.get("/v1/models", headers={"x-api-key": KEY}).json()["data"]
        assert model["id"] == "chat"
        logs = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
        assert not [path for path in logs if path.name != "manifests.yaml" and KEY.encode() in path.read_bytes()]
