"""Another owner's metrics adapter: serves custom.metrics.k8s.io/v1beta1 with one metric of Deployments.

As prometheus-adapter would: aggregated over TLS, with discovery and a value that HPAs scale by. Standard library only,
so that a pod runs it as a file of a ConfigMap (`python other_adapter.py PORT CERTIFICATE KEY`); the operator's tests
run it in a thread.
"""

import json
import re
import ssl
import sys
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

GROUP_VERSION = "custom.metrics.k8s.io/v1beta1"
METRIC = "requests"
VALUE = "6"

_VALUE_PATH = re.compile(rf"/apis/{GROUP_VERSION}/namespaces/([^/]+)/deployments\.apps/([^/]+)/{METRIC}")


def build_hpa(deployment: str) -> dict[str, Any]:
    """An HPA that this adapter keeps at three replicas."""
    reference = {"apiVersion": "apps/v1", "kind": "Deployment", "name": deployment}
    target = {"type": "AverageValue", "averageValue": "2"}
    metric = {"describedObject": reference, "metric": {"name": METRIC}, "target": target}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": deployment},
        "spec": {
            "scaleTargetRef": reference,
            "minReplicas": 1,
            "maxReplicas": 5,
            "metrics": [{"type": "Object", "object": metric}],
        },
    }


def answer(path: str) -> dict[str, Any] | None:
    """Return the document at a path of the API; None if there is none."""
    if path == f"/apis/{GROUP_VERSION}":
        resource = {"name": f"deployments.apps/{METRIC}", "singularName": "", "namespaced": True, "verbs": ["get"]}
        resources = [resource | {"kind": "MetricValueList"}]
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": GROUP_VERSION, "resources": resources}
    if not (found := _VALUE_PATH.fullmatch(path)):
        return None
    described = {"apiVersion": "apps/v1", "kind": "Deployment", "namespace": found[1], "name": found[2]}
    value = {"describedObject": described, "metricName": METRIC, "value": VALUE}
    value["timestamp"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"kind": "MetricValueList", "apiVersion": GROUP_VERSION, "metadata": {}, "items": [value]}


class Handler(BaseHTTPRequestHandler):
    """Answers with the documents of an API, and with a Status where there is none."""

    timeout = 5

    def answer(self, path: str) -> dict[str, Any] | None:
        return answer(path)

    def do_GET(self) -> None:
        found = self.answer(self.path.partition("?")[0])
        body = json.dumps(found or {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404}).encode()
        self.send_response(404 if found is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def build_server(host: str, port: int, certificate: str, key: str) -> ThreadingHTTPServer:
    """Build a listening server. Each connection does its handshake in its own thread."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = ThreadingHTTPServer((host, port), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    return server


if __name__ == "__main__":
    build_server("", int(sys.argv[1]), sys.argv[2], sys.argv[3]).serve_forever()
