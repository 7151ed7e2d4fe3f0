"""Tests the reason and the sentence that explain why a pod does not run."""

import json
from collections.abc import Callable

import pytest
from tests.operator import kubelet
from tests.operator.builders import ended, make_pod

from conveyor_operator.inferenceservice.failures import PodFailure, find_failure, find_failures, find_last_failure
from conveyor_operator.inferenceservice.pods import ContainerState, observe_pod

POD = {"metadata": {"name": "qwen-engine-1"}, "spec": {}}


def last_words_of(reason: str, message: str) -> str:
    return json.dumps({"reason": reason, "message": message})


def find(container: ContainerState) -> PodFailure:
    failure = find_failure(make_pod("pod", container))
    assert failure is not None
    return failure


def test_what_the_engine_says_is_what_the_user_reads() -> None:
    failure = find(ended(last_words_of("KVBudgetTooLarge", "4096 blocks need 9 GiB,\n4 GiB are free")))
    assert failure.reason == "KVBudgetTooLarge"
    assert failure.message == "4096 blocks need 9 GiB, 4 GiB are free"
    assert (failure.exit_code, failure.since, failure.pod) == (1, "2026-11-21T08:00:00Z", "pod")


def test_the_engine_s_settings_are_reported_as_fields_of_the_resource() -> None:
    message = (
        "`num_kv_blocks` gives 8 KV blocks; set `max_model_len` to 128 or `device: auto`, not `dtype: float16`; "
        "use `kv_cache_dtype: int8`; remove `draft_model` or `speculation: draft`; "
        "`warmup` and `host` stay; `rm -rf`"
    )
    assert find(ended(last_words_of("KVBudgetTooSmall", message))).message == (
        "kvCache.blockBudget gives 8 KV blocks; set engine.maxModelLen to 128 or engine.device: Auto, "
        "not engine.dtype: Float16; use kvCache.dtype: INT8; "
        "remove speculation.draft.uri or speculation.method: Draft; "
        "CONVEYOR_ENGINE_WARMUP in pod.env and `host` stay; `rm -rf`"
    )


@pytest.mark.parametrize("message", ["[" * 4000, '{"message": "x", "reason": {}}', '{"message": "x", "reason": []}'])
def test_what_an_image_of_somebody_else_writes_ends_nothing(message: str) -> None:
    assert find(ended(message)).reason in ("CrashLoop", "EngineError")


@pytest.mark.parametrize("quoted", [json.dumps, lambda report: report["message"]], ids=["told", "last words"])
def test_an_image_s_words_cannot_command_a_terminal(quoted: Callable[[dict[str, str]], str]) -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J ok\u202e gnp\x9b0m \ud800"
    failure = find(ended(quoted({"reason": "EngineError\x1b[31m", "message": hostile})))
    assert failure.message.isprintable()
    assert failure.reason.isalnum()


def test_a_pod_s_reason_that_is_no_word_is_not_repeated() -> None:
    failures = [
        find_failure(make_pod("p", phase="Failed", reason=reason)) for reason in ("Evicted", "\x1b[2J", "x" * 999)
    ]
    assert [failure and failure.reason for failure in failures] == ["Evicted", "PodFailed", "PodFailed"]


def test_a_reason_that_this_operator_does_not_know_is_reported_too() -> None:
    failure = find(ended(last_words_of("NewReason", "something new")))
    assert (failure.reason, failure.message) == ("EngineError", "NewReason: something new")


@pytest.mark.parametrize("message", ["Traceback: boom", "[1, 2]", '{"reason": "ModelNotFound"}', "", '"text"'])
def test_an_ending_without_a_reason_is_a_crash_with_its_last_words(message: str) -> None:
    failure = find(ended(message, code=3))
    assert failure.reason == "CrashLoop"
    assert "exit code 3" in failure.message
    assert message in failure.message


def test_a_fetch_that_ends_without_a_reason_is_no_failed_download() -> None:
    """The fetch itself reports a failed download as the reason."""
    assert find(ended("Segmentation fault", code=139, name="fetch")).reason == "CrashLoop"


@pytest.mark.parametrize(
    ("message", "reason", "code"),
    [
        ("/usr/bin/python: No module named conveyor_engine", "Error", 1),
        ("Error while finding module specification for 'conveyor_engine' (ModuleNotFoundError: No module named "
         "'conveyor_engine')", "Error", 1),
        ('failed to create containerd task: exec: "python": executable file not found in $PATH', "StartError", 128),
        ("exec /usr/bin/python: exec format error", "Error", 255),
    ],
)  # fmt: skip
@pytest.mark.parametrize("container", ["fetch", "engine"])
def test_an_image_without_an_engine_is_reported_with_the_field(
    message: str, reason: str, code: int, container: str
) -> None:
    failure = find(ended(message, code=code, reason=reason, name=container))
    assert failure.reason == "ContainerConfigInvalid"
    assert failure.message == (
        f"container {container} cannot run in image example/engine:1; correct engine.image: {message}"
    )


def test_a_killed_child_is_a_killed_container_whatever_the_engine_says() -> None:
    """With cgroup v1 the kernel kills one process, and the container's first process can still write its own guess."""
    words = last_words_of("EngineError", "the engine process was ended by SIGKILL")
    assert find(ended(words, code=1, reason="OOMKilled")).reason == "OOMKilled"
    assert find(ended(last_words_of("OOMKilled", "the engine process used more"), code=1)).reason == "OOMKilled"


def test_a_pod_killed_for_its_memory_says_what_to_raise() -> None:
    failure = find(ended(code=137, reason="OOMKilled"))
    assert failure.reason == "OOMKilled"
    assert "resources.limits.memory" in failure.message


@pytest.mark.parametrize(
    ("sentence", "reason"),
    [
        ("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.", "InsufficientGPU"),
        ("0/3 nodes are available: 1 Insufficient amd.com/gpu, 2 Insufficient cpu.", "InsufficientGPU"),
        ("0/3 nodes are available: 3 Insufficient memory.", "Unschedulable"),
        ('0/3 nodes are available: persistentvolumeclaim "models" not found.', "ClaimNotFound"),
    ],
)
def test_the_schedulers_sentence_becomes_a_reason(sentence: str, reason: str) -> None:
    failure = find_failure(make_pod(unschedulable=sentence, phase="Pending"))
    assert failure is not None
    assert failure.reason == reason
    assert failure.message == sentence or reason == "ClaimNotFound"


def test_a_missing_claim_is_reported_with_its_namespace_and_the_field() -> None:
    sentence = '0/1 nodes are available: persistentvolumeclaim "models" not found. not found'
    failure = find_failure(make_pod(namespace="team-a", unschedulable=sentence, phase="Pending"))
    assert failure is not None
    assert failure.message == (
        "namespace team-a has no PersistentVolumeClaim models; create it, or correct model.uri or model.cache.claimName"
    )


def test_an_image_that_cannot_be_pulled_is_reported_in_the_same_words_during_and_between_tries() -> None:
    cause = "failed to resolve reference: example/engine:1: not found"
    between = f'Back-off pulling image "example/engine:1": ErrImagePull: {cause}'
    for waiting, message in (("ErrImagePull", cause), ("ImagePullBackOff", between)):
        state = ContainerState("engine", "example/engine:1", waiting_reason=waiting, waiting_message=message)
        assert find(state).message == f"image example/engine:1 cannot be pulled: {cause}"


@pytest.mark.parametrize(
    ("waiting", "message", "reason"),
    [
        ("ErrImagePull", "not found", "ImagePullFailed"),
        ("ImagePullBackOff", "Back-off", "ImagePullFailed"),
        ("InvalidImageName", "bad", "ImagePullFailed"),
        ("CreateContainerConfigError", 'secret "hub" not found', "SecretNotFound"),
        ("CreateContainerConfigError", "couldn't find key token in Secret default/hub", "SecretNotFound"),
        ("CreateContainerConfigError", 'configmap "x" not found', "ContainerConfigInvalid"),
        ("RunContainerError", "exec", "ContainerConfigInvalid"),
    ],
)
def test_what_keeps_a_container_from_starting_becomes_a_reason(waiting: str, message: str, reason: str) -> None:
    failure = find(ContainerState("fetch", "example/engine:1", True, waiting_reason=waiting, waiting_message=message))
    assert failure.reason == reason
    assert message in failure.message


@pytest.mark.parametrize("waiting", ["ContainerCreating", "PodInitializing", ""])
def test_a_pod_that_is_on_its_way_has_no_failure(waiting: str) -> None:
    assert find_failure(make_pod("pod", ContainerState("engine", waiting_reason=waiting))) is None


def test_the_end_of_a_long_log_is_reported() -> None:
    message = find(ended("Traceback\n" * 200 + "RuntimeError: no room")).message
    assert message.startswith("container engine ended with exit code 1: ...")
    assert message.endswith("RuntimeError: no room")
    assert len(message) < 600


def test_a_fetch_that_is_done_is_no_failure() -> None:
    assert find_failure(make_pod("pod", ended(code=0, reason="Completed", name="fetch"))) is None


def test_a_restarted_engine_failed_until_it_is_ready_again() -> None:
    restarted = ended("", running=True)
    assert find_failure(make_pod("pod", restarted)) is not None
    well = ended("", running=True, ready=True)
    assert find_failure(make_pod("pod", well)) is None
    assert find_last_failure([make_pod("pod", well, ready=True)]) is not None


def test_a_pod_that_waits_for_its_scheduling_gates_has_found_no_node_since_it_was_made() -> None:
    gates = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "blocked by gates"}
    metadata = {"name": "gated", "creationTimestamp": "2026-11-21T08:00:00Z"}
    failure = find_failure(observe_pod({"metadata": metadata, "status": {"conditions": [gates]}}))
    assert failure is not None
    assert (failure.reason, failure.since) == ("Unschedulable", metadata["creationTimestamp"])


def test_pods_that_leave_or_are_ready_are_no_failures() -> None:
    broken = ended("boom")
    assert find_failures([make_pod("a", broken, leaving=True), make_pod("b", broken, ready=True)]) == []
    assert find_last_failure([make_pod("a", broken, leaving=True)]) is None


def test_the_latest_failure_comes_first_whatever_the_order_of_the_pods() -> None:
    early = make_pod("early", ended("a", ended_at="2026-11-21T08:00:00Z"))
    late = make_pod("late", ended("b", ended_at="2026-11-21T09:00:00Z"))
    assert [f.pod for f in find_failures([early, late])] == ["late", "early"]
    assert find_failures([late, early]) == find_failures([early, late])


def test_an_evicted_pod_keeps_the_reason_of_kubernetes() -> None:
    failure = find_failure(make_pod(phase="Failed", reason="Evicted", message="low on memory"))
    assert failure is not None
    assert (failure.reason, failure.message) == ("Evicted", "low on memory")


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (kubelet.fetch_failed(POD, "ModelNotFound", "no such model"), "ModelNotFound"),
        (kubelet.oom_killed(POD), "OOMKilled"),
        (kubelet.unschedulable(POD), "InsufficientGPU"),
        (kubelet.image_pull_failed(POD), "ImagePullFailed"),
    ],
)
def test_statuses_as_the_kubelet_writes_them_are_understood(status: dict, reason: str) -> None:
    failure = find_failure(observe_pod({**POD, "status": status}))
    assert failure is not None
    assert failure.reason == reason


def test_a_running_pod_as_the_kubelet_writes_it_is_ready() -> None:
    pod = observe_pod({**POD, "status": kubelet.ready(POD)})
    assert pod.ready
    assert find_failure(pod) is None
