"""Tests a console process with a real API server: who sees what, and what the pages contain."""

import http.client
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from uuid import uuid4

import pytest
from tests.console.process import ConsoleProcess, make_reader, request_token, wait_until_allowed
from tests.gateway.cluster import Cluster

from conveyor_console.app import COOKIE, MAX_STREAMS_EACH
from e2e.cluster.api import Api

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"
READY = {"type": "Ready", "status": "True", "reason": "Ready", "message": "1 of 1 pods are ready"}
NOT_READY = {"type": "Ready", "status": "False", "reason": "ImagePullFailed", "message": HOSTILE}


def set_ready(cluster: Cluster, name: str, condition: dict[str, str], **status: object) -> None:
    dated = {**condition, "lastTransitionTime": "2026-11-30T00:00:00Z"}
    cluster.set_status(name, observedGeneration=1, conditions=[dated], **status)


def test_without_a_token_the_overview_leads_to_the_page_for_signing_in(console: ConsoleProcess) -> None:
    page = console.get("/")
    assert (page.status, page.headers["location"]) == (303, "/sign-in")
    assert console.get("/events").status == 401
    assert "kubectl create token" in console.get("/sign-in").text


@pytest.mark.parametrize("path", ["/", "/events"])
def test_a_forged_token_gets_401(console: ConsoleProcess, token: str, path: str) -> None:
    head, body, signature = token.split(".")
    forged = f"{head}.{body}.{signature[:-8]}AAAAAAAA"
    for wrong in (forged, "x", "a" * 8000):
        page = console.get(path, wrong)
        assert page.status == 401
        assert page.headers["www-authenticate"] == "Bearer"


def test_each_team_sees_the_services_of_its_namespace_only(console: ConsoleProcess, crd: Api, cluster: Cluster) -> None:
    other = f"other-{uuid4().hex[:8]}"
    crd.create("/api/v1/namespaces", {"metadata": {"name": other}})
    tokens = {each: make_reader(crd, each) for each in (cluster.namespace, other)}
    for each in tokens:
        Cluster(crd, each).apply_service(f"of-{each}")
    for own, token in tokens.items():
        text = console.wait_for(f"of-{own}", token)
        assert "1 service:" in text
        with streaming(console, token) as events:
            assert f"of-{own}" in next(events)
        for foreign in tokens.keys() - {own}:
            assert foreign not in text
            assert "No service that you may see" in console.get(f"/?q={foreign}", token).text
    Cluster(crd, other).clear()


def test_who_may_list_nothing_sees_nothing(console: ConsoleProcess, crd: Api, cluster: Cluster, token: str) -> None:
    cluster.apply_service("qwen")
    console.wait_for("qwen", token)
    nobody = request_token(crd, cluster.namespace, "default")
    assert "There are no services that you may see." in console.get("/", nobody).text


def test_who_may_list_everywhere_sees_all_teams(console: ConsoleProcess, crd: Api, cluster: Cluster) -> None:
    name = f"admin-{cluster.namespace}"
    token = make_reader(crd, cluster.namespace, name)
    rule = {"apiGroups": ["conveyor.dev"], "resources": ["inferenceservices"], "verbs": ["list"]}
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    crd.create(f"{rbac}/clusterroles", {"metadata": {"name": name}, "rules": [rule]})
    subject = {"kind": "ServiceAccount", "name": name, "namespace": cluster.namespace}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name}
    crd.create(f"{rbac}/clusterrolebindings", {"metadata": {"name": name}, "roleRef": reference, "subjects": [subject]})
    wait_until_allowed(crd, cluster.namespace, name, "")
    elsewhere = Cluster(crd, "default")
    for each in (cluster, elsewhere):
        each.apply_service("seen-by-admin")
    console.wait_for("2 services:", token, "/?q=seen-by-admin")
    elsewhere.delete_service("seen-by-admin")


def test_signing_in_sets_a_cookie_that_scripts_cannot_read_and_other_sites_do_not_send(
    console: ConsoleProcess, cluster: Cluster, token: str
) -> None:
    page = console.post("/sign-in", {"Sec-Fetch-Site": "same-origin"}, token=f" {token}\n")
    assert (page.status, page.headers["location"]) == (303, "/")
    cookie = page.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    assert "Secure" not in cookie
    assert token not in cookie, "other programs on the host get the cookie"
    assert console.get("/", Cookie=cookie.partition(";")[0]).status == 200
    behind_tls = console.post("/sign-in", {"X-Forwarded-Proto": "https"}, token=token)
    assert "Secure" in behind_tls.headers["set-cookie"].split("; ")
    left = console.post("/sign-out", {"Cookie": cookie.partition(";")[0]})
    assert re.match(f'{COOKIE}=""; .*Max-Age=0', left.headers["set-cookie"])


@pytest.mark.parametrize("value", ["x", "gAAAAAB", '"\\351"'])
def test_a_forged_cookie_is_no_token(console: ConsoleProcess, token: str, value: str) -> None:
    for each in (value, token):
        assert console.get("/", Cookie=f"{COOKIE}={each}").status == 303


def test_a_token_that_browsers_cannot_keep_is_refused_with_the_reason(
    console: ConsoleProcess, crd: Api, cluster: Cluster, token: str
) -> None:
    path = f"/api/v1/namespaces/{cluster.namespace}/serviceaccounts/reader/token"
    audiences = ["https://kubernetes.default.svc", *(f"audience-{number:0100}" for number in range(25))]
    long: str = crd.create(path, {"spec": {"audiences": audiences}})["status"]["token"]
    page = console.post("/sign-in", {}, token=long)
    assert page.status == 400
    assert "too long for a cookie" in page.text
    assert "set-cookie" not in page.headers


def test_a_wrong_token_is_refused_at_the_page_for_signing_in(console: ConsoleProcess) -> None:
    page = console.post("/sign-in", {}, token=HOSTILE)
    assert page.status == 401
    assert "Kubernetes does not accept this token" in page.text
    assert HOSTILE not in page.text
    assert "set-cookie" not in page.headers


@pytest.mark.parametrize(
    "headers", [{"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, {"Origin": "https://evil.example"}]
)
@pytest.mark.parametrize("path", ["/sign-in", "/sign-out"])
def test_a_form_of_another_site_is_refused(
    console: ConsoleProcess, token: str, path: str, headers: dict[str, str]
) -> None:
    page = console.post(path, headers, token=token)
    assert page.status == 403
    assert "set-cookie" not in page.headers


def test_texts_of_tenants_are_escaped(console: ConsoleProcess, cluster: Cluster, token: str) -> None:
    cluster.apply_service("qwen")
    set_ready(cluster, "qwen", NOT_READY, model={"name": HOSTILE}, autoscaling={"message": HOSTILE})
    text = console.wait_for("ImagePullFailed", token)
    assert "&lt;script&gt;" in text
    assert "<script>" not in text
    assert "<img" not in text
    assert "onerror=alert(1)&gt;" in text
    searched = console.get("/?q=%3Cscript%3Ealert(1)%3C/script%3E", token).text
    assert "<script>" not in searched
    assert "alert(1)" in searched


def test_pages_allow_no_script_but_the_programs_own_files(console: ConsoleProcess, token: str) -> None:
    for page in (console.get("/", token), console.get("/sign-in"), console.get("/nowhere", token)):
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert page.headers["x-content-type-options"] == "nosniff"
        assert page.headers["cache-control"] == "no-store"
        assert not re.search(r"<script(?! src=\"/static/[a-z.-]+\"></script>)|<style|\son[a-z]+=|\sstyle=", page.text)
    assert console.get("/nowhere", token).status == 404


def test_files_are_only_those_of_the_folder_static(console: ConsoleProcess) -> None:
    assert console.get("/static/console.css").headers["content-type"] == "text/css"
    for path in ("/static/app.py", "/static/..%2fapp.py", "/static/../app.py", "/static/"):
        assert console.get(path).status in (404, 401), path


def test_services_in_trouble_come_first_with_their_reason(
    console: ConsoleProcess, cluster: Cluster, token: str
) -> None:
    for name in ("a-well", "b-down"):
        cluster.apply_service(name)
    set_ready(cluster, "a-well", READY, readyReplicas=1, desiredReplicas=1, effective={"mode": "Continuous"})
    set_ready(cluster, "b-down", {**NOT_READY, "message": "the image does not exist"})
    text = console.wait_for("ImagePullFailed", token)
    assert text.index("b-down") < text.index("a-well")
    assert "2 services: 1 not ready, 0 to look at, 1 well." in text
    assert "ImagePullFailed: the image does not exist" in text
    assert "<small>Continuous</small>" in text, "the task is not known yet"


def test_the_stream_sends_only_lines_that_have_changed(console: ConsoleProcess, cluster: Cluster, token: str) -> None:
    for name in ("first", "second"):
        cluster.apply_service(name)
        set_ready(cluster, name, READY, readyReplicas=1, desiredReplicas=1)
    console.wait_for("2 services: 0 not ready, 0 to look at, 2 well.", token)
    with streaming(console, token) as events:
        whole = next(events)
        assert whole.count("<tr") == 2
        assert whole.startswith("<t"), "HTML drops rows that follow other elements"
        set_ready(cluster, "second", READY, readyReplicas=1, desiredReplicas=1, autoscaling={"message": "1 replicas"})
        changed = next(each for each in events if "<tr" in each)
    assert changed.count("<tr") == 1
    assert changed.startswith("<tr")
    assert "second" in changed
    assert "summary" not in changed


def test_a_stream_has_the_time_of_its_last_change(console: ConsoleProcess, cluster: Cluster, token: str) -> None:
    cluster.apply_service("qwen")
    console.wait_for("qwen", token)
    for path in ("/", f"/services/{cluster.namespace}/qwen"):
        shown = re.search(r'<p id="as-of">As of (\d\d:\d\d:\d\d) UTC', console.get(path, token).text)
        assert shown is not None
        with streaming(console, token, f"{path.rstrip('/')}/events") as events:
            times = {found[1] for _ in range(20) if (found := re.search(r"As of (\S+) UTC", next(events)))}
        assert len(times) > 1
        assert min(times) >= shown[1]


def test_a_stream_ends_with_the_reason_when_its_token_is_no_longer_valid(
    console: ConsoleProcess, crd: Api, cluster: Cluster, token: str
) -> None:
    cluster.apply_service("qwen")
    console.wait_for("qwen", token)
    with streaming(console, token) as events:
        crd.delete(f"/api/v1/namespaces/{cluster.namespace}/serviceaccounts/reader")
        *_, last = events
    assert '<p id="as-of" class="problem" role="alert" hx-swap-oob' in last
    assert "Sign in again" in last
    again = console.get("/events", token)
    assert (again.status, again.headers["content-type"]) == (401, "text/event-stream")
    assert "Sign in again" in again.text


def test_a_user_has_a_limited_number_of_streams(console: ConsoleProcess, cluster: Cluster, token: str) -> None:
    cluster.apply_service("qwen")
    console.wait_for("qwen", token)
    with ExitStack() as opened, ThreadPoolExecutor(24) as pool:
        streams = list(pool.map(lambda _: opened.enter_context(connecting(console, token)), range(24)))
        refused = [each.read().decode() for each in streams if each.status == 503]
    assert len(streams) - len(refused) == MAX_STREAMS_EACH
    assert all("Too many pages are open" in text and "\nretry: " in f"\n{text}" for text in refused)


def test_who_sees_no_service_gets_no_stream(console: ConsoleProcess, crd: Api, cluster: Cluster, token: str) -> None:
    cluster.apply_service("qwen")
    console.wait_for("qwen", token)
    page = console.get("/events", request_token(crd, cluster.namespace, "default"))
    assert (page.status, page.headers["content-type"]) == (503, "text/event-stream")
    assert "you see no services" in page.text
    assert console.get(f"/events?q={uuid4().hex}", "x").status == 401
    with streaming(console, token, f"/events?q={uuid4().hex}") as events:
        assert "0 services:" in next(events)


@contextmanager
def connecting(
    console: ConsoleProcess, token: str, path: str = "/events?q=&page=1"
) -> Iterator[http.client.HTTPResponse]:
    """Yield the response to a request for a stream, whose body is not read."""
    connection = http.client.HTTPConnection("127.0.0.1", console.port, timeout=90)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
        yield connection.getresponse()
    finally:
        connection.close()


@contextmanager
def streaming(console: ConsoleProcess, token: str, path: str = "/events?q=&page=1") -> Iterator[Iterator[str]]:
    """Yield an iterator over the messages of a stream, each as HTML."""
    with connecting(console, token, path) as response:
        assert (response.status, response.headers["Content-Type"]) == (200, "text/event-stream")

        def read() -> Iterator[str]:
            lines: list[str] = []
            while line := response.readline().decode():
                if line.startswith("data: "):
                    lines.append(line.removeprefix("data: "))
                elif lines:
                    yield "".join(lines)
                    lines.clear()

        yield read()


def test_a_page_of_many_services_has_fifty(console: ConsoleProcess, cluster: Cluster, token: str) -> None:
    for number in range(51):
        cluster.apply_service(f"many-{number:03}")
    first = console.wait_for("51 services", token)
    assert first.count("<tr id=") == 50
    assert "Page 1 of 2" in first
    second = console.get("/?page=2", token).text
    assert second.count("<tr id=") == 1
    assert "many-050" in second
    for number in ("0", "-1", "9999999", "x", "3"):
        assert console.get(f"/?page={number}", token).status == 200
