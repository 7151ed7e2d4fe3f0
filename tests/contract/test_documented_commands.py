"""Every block and every command of the documentation is run by a test, or shown on purpose; a new one must say which.

A test runs a block if its file names the page (it reads the block from there) or has the command word for word.
"""

import re

import yaml

from e2e.cluster.images import IMAGES
from e2e.cluster.paths import REPOSITORY

PAGES = {
    str(path.relative_to(REPOSITORY)): path.read_text()
    for path in sorted((*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("**/*.md")))
}
BLOCK = re.compile(r"^```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)

SHOWN = "nothing to run: a picture, a formula, an answer"
README = "e2e/test_quickstart.py::test_the_readme_s_demo_does_what_it_says_and_its_curl_answers"
QUICKSTART = "e2e/test_quickstart.py::test_the_quickstart_s_commands_do_what_they_say"
SECOND = "e2e/test_second_service.py::test_the_page_on_a_second_service_ends_with_two_of_them"
OPERATIONS = "tests/chart/test_operations.py::"
BENCHMARKS = "tests/contract/test_benchmarks.py::"
HERE = "tests/contract/test_documented_commands.py::"
SERVICES = OPERATIONS + "test_services_are_looked_at_saved_deleted_and_brought_back"

# How each block of a page begins, in the page's order.
BLOCKS = {
    "README.md": [
        ("apiVersion:", "e2e/test_quickstart.py::test_the_readme_shows_the_manifest_that_the_demo_applies"),
        ("make demo ", README),
        ("curl ", README),
        ('{"id":"chatcmpl', SHOWN),
        (" client ──►", SHOWN),
        ("make test ", HERE + "test_every_target_that_a_page_names_is_there"),
        ("operator/conveyor_api ", SHOWN),
    ],
    "docs/autoscaling.md": [("desired = ", SHOWN), ("kubectl get --raw", README)],
    "docs/benchmarks.md": [
        (
            ".venv/bin/python -m conveyor_engine bench --compare hf-static",
            "tests/engine/bench/test_bench.py::test_the_last_line_is_one_json_object_with_the_ratio_to_the_peer",
        ),
        (
            ".venv/bin/python -m conveyor_engine bench --compare modes",
            "tests/engine/bench/test_bench.py::test_the_modes_are_compared_on_the_same_requests",
        ),
        (".venv/bin/python bench/gateway.py", BENCHMARKS + "test_the_gateway_s_loses_nothing"),
        (".venv/bin/python bench/hostile_engine.py", BENCHMARKS + "test_a_hostile_client_of_an_engine_is_measured"),
        (".venv/bin/python bench/hostile.py", BENCHMARKS + "test_hostile_clients_of_a_gateway_are_measured"),
        (".venv/bin/python bench/heavy_objects.py", BENCHMARKS + "test_heavy_objects_are_measured"),
        (".venv/bin/python bench/reconcile.py", BENCHMARKS + "test_the_operator_s_can_start"),
    ],
    "docs/models.md": [("engine:", "tests/api/test_admission.py::test_the_documentation_s_part_of_a_spec_is_taken")],
    "docs/operations.md": [
        ("time=", SHOWN),
        ("kubectl apply", OPERATIONS + "test_a_definition_that_was_applied_by_hand_is_taken_over_when_told_so"),
        ("helm upgrade conveyor", OPERATIONS + "test_one_value_is_changed_and_the_others_are_kept"),
    ],
    "docs/quickstart.md": [
        ("docker build", HERE + "test_the_quickstart_builds_the_images_that_there_are"),
        ("helm upgrade --install", QUICKSTART),
        ("kubectl apply", QUICKSTART),
        ("kubectl wait", QUICKSTART),
        ("kubectl -n conveyor-system port-forward", QUICKSTART),
        ("kubectl wait", QUICKSTART),
        ("kubectl patch", QUICKSTART),
    ],
    "docs/second-service.md": [
        ("kubectl create namespace", SECOND),
        ("kubectl apply", SECOND),
        ("kubectl -n team-a wait infsvc/chat", SECOND),
        ("kubectl -n conveyor-system port-forward", SECOND),
        ("kubectl apply", SECOND),
        ("IMAGE=", SECOND),
        ("kubectl -n team-a wait job/fill-models", SECOND),
        ("kubectl apply", SECOND),
        ("kubectl -n team-a wait infsvc/local", SECOND),
        ("kubectl delete namespace", SECOND),
    ],
    "docs/sizing.md": [("bytes per token = ", SHOWN)],
}
# Commands within a sentence; what is shorter than four words only names a command.
COMMANDS = {
    "kubectl explain infsvc.spec --recursive": OPERATIONS + "explain",
    "helm rollback conveyor -n conveyor-system": (
        OPERATIONS + "test_a_rollback_brings_the_earlier_deployments_and_definition"
    ),
    "kubectl get infsvc -A -o yaml > infsvc.yaml": SERVICES,
    "kubectl delete infsvc -A --all": SERVICES,
    "helm uninstall conveyor -n conveyor-system": SERVICES,
    "kubectl delete crd inferenceservices.conveyor.dev": SERVICES,
    "kubectl describe infsvc NAME": SERVICES,
    "kubectl -n team-a describe infsvc chat": SECOND,
    "kubectl get apiservice v1beta2.custom.metrics.k8s.io": (
        "tests/chart/test_release.py::test_an_upgrade_keeps_the_certificate_and_the_registration"
    ),
    "kubectl logs deploy/NAME-engine | grep kv_cache_allocated": QUICKSTART,
    "kubectl logs POD -c engine --previous": (
        "e2e/test_engine_killed.py::test_an_engine_killed_in_its_streams_gives_clear_errors_and_the_next_request_works"
    ),
}


def source(test: str) -> str:
    """The file of `path::name`, which must have a function of that name, or use one."""
    path, _, name = test.partition("::")
    text = (REPOSITORY / path).read_text()
    assert re.search(rf"\b{name}\(", text), test
    return text


def test_every_block_is_run_by_a_test() -> None:
    blocks = {page: BLOCK.findall(text) for page, text in PAGES.items() if BLOCK.search(text)}
    assert blocks.keys() == BLOCKS.keys()
    for page, found in blocks.items():
        assert len(found) == len(BLOCKS[page]), (page, found)
        for block, (beginning, test) in zip(found, BLOCKS[page], strict=True):
            assert block.startswith(beginning), (page, block)
            assert test == SHOWN or page in source(test) or block.splitlines()[0] in source(test), (page, block)


def test_every_command_in_a_sentence_is_run_by_a_test() -> None:
    sentences = "\n".join(BLOCK.sub("", text) for text in PAGES.values())
    commands = set(re.findall(r"`((?:kubectl|helm|docker|curl) [^`\n]+)`", sentences))
    found = {re.sub(r"infsvc qwen$", "infsvc NAME", command) for command in commands if len(command.split()) >= 4}
    assert found == COMMANDS.keys()
    for command, test in COMMANDS.items():
        assert command in source(test) or command.replace("NAME", "qwen") in source(test), command


def test_every_target_that_a_page_names_is_there() -> None:
    """README.md's `make test` and `make e2e` are what CI runs."""
    text = "\n".join(PAGES.values())
    named = set(re.findall(r"`make ([a-z0-9-]+)(?: [A-Z]+=\S+)?`", text)) | set(
        re.findall(r"^make ([a-z0-9-]+)", text, re.M)
    )
    assert {"demo", "demo-down", "test", "e2e", "help", "check", "generate"} <= named
    targets = set(re.findall(r"^([a-z0-9-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    parts = {f"test-{folder.name}" for folder in (REPOSITORY / "tests").iterdir() if folder.is_dir()}
    assert named <= targets | parts
    assert re.search("for target in check test .*e2e", (REPOSITORY / ".ci" / "run").read_text())


def test_the_quickstart_builds_the_images_that_there_are() -> None:
    version = yaml.safe_load((REPOSITORY / "charts" / "conveyor" / "Chart.yaml").read_text())["appVersion"]
    built = re.findall(
        r"docker build -f (\S+) -t registry.example.com/(\S+):(\S+) \.$", PAGES["docs/quickstart.md"], re.M
    )
    assert built == [
        (str(image.dockerfile.relative_to(REPOSITORY)), image.repository.removeprefix("docker.io/"), version)
        for image in IMAGES.values()
    ]
