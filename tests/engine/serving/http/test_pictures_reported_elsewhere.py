"""What users of other programs reported of SDXL and edits, tried on a real server with a tiny SDXL."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.engine.paint_layouts import save_layout
from tests.engine.paint_models import Brief, open_pipeline, paint
from tests.engine.processes import EngineServer
from tests.engine.serving.http.test_picture_edits import edit
from tests.engine.serving.http.test_pictures import Served, assert_same, read

EDIT = Brief("a red circle", 3, num_steps=6, strength=0.5)
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of diffusers
FIELDS = {"num_inference_steps": 6, "guidance_scale": 5.0}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("xl")
    save_layout(folder / "tiny", "xl")
    with EngineServer(folder / "server", folder / "tiny", max_num_seqs=4, num_threads=1, dtype="float32") as server:
        yield Served(server.wait_ready(), open_pipeline(folder / "tiny"))


# stable-diffusion-webui#16099: an edit failed if it was the first request to an SDXL model.
# InvokeAI#2931: with a seed, all pictures of an edit were equal.
def test_the_first_request_may_be_an_edit_whose_pictures_differ(served: Served) -> None:
    made = edit(served, n=3, seed=3, **FIELDS)["data"]
    assert [one["seed"] for one in made] == [3, 4, 5]
    assert len({one["b64_json"] for one in made}) == 3
    for one in made:
        assert_same(read(one["b64_json"]), paint(served.pipeline, EDIT._replace(seed=one["seed"])))


# sd-webui-animatediff#4: long negative prompts changed other pictures of the batch.
# sdnext#4221: the seeds of a batch were not those of its pictures.
def test_long_negative_prompts_change_their_own_picture_only(served: Served) -> None:
    def check(negative: str | None, **fields: Any) -> None:
        body = {"n": 2, "seed": 11, "negative_prompt": negative, **FIELDS, **fields}
        for one in served.post(**body)["data"]:
            brief = Brief("a red circle", one["seed"], 6, negative=negative)
            assert_same(read(one["b64_json"]), paint(served.pipeline, brief))

    for negative in (None, "", "blue star", "a picture of a black square " * 30):
        check(negative)
