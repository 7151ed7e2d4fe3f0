"""The services that the client of one request may see. All others look as if they did not exist.

`listening` makes a view for each request. `routing`, `relaying` and `pages` find services through it.
"""

from dataclasses import dataclass

from conveyor_gateway.caller import Caller
from conveyor_gateway.errors import Code, GatewayError
from conveyor_gateway.watching.catalog import Directory, NamedModel, Service

_HOW = "a key is sent as Authorization: Bearer KEY or x-api-key: KEY"


@dataclass(frozen=True, slots=True)
class View:
    """A directory as one client sees it.

    problem: why the client's proof was rejected; "" if it sent none. is_pending: another attempt may succeed soon.
    address: the client without its proof (`clients.Client.id`).
    """

    directory: Directory
    caller: Caller | None = None
    problem: str = ""
    is_pending: bool = False
    address: str = ""

    def find_service(self, key: str) -> Service | None:
        """Return the service with this `namespace/name`; None if there is none that the client may see."""
        service = self.directory.services.get(key)
        return service if service is not None and self.may_use(service) else None

    def find_model(self, model: str) -> NamedModel | None:
        """Return the model that this name selects at the root; None if there is none that the client may see."""
        found = self.directory.find_model(model)
        return found if found is not None and self.may_use(found.service) else None

    def may_use(self, service: Service) -> bool:
        directory = self.directory
        if not directory.num_guarded or not service.rules.need_proof(directory.default_access):
            return True
        return self.caller is not None and service.rules.allow(self.caller, service.namespace, service.name)

    def name_client(self, service: Service | None) -> str:
        """Return the client whose share of the capacity the request uses. service: None while it is not known.

        A namespace that has many keys has no more shares of other namespaces' services. So only a caller of the
        service's own namespace has a share of its own; the others of a namespace have one together, `NAMESPACE/*`. A
        client without a proof that counts for the service has the share of its address.
        """
        caller = self.caller
        if caller is None:
            return self.address
        if service is not None and not service.rules.allow(caller, service.namespace, service.name):
            return self.address
        if service is not None and service.namespace == caller.namespace:
            return caller.name
        return f"{caller.namespace}/*"

    def lists(self, service: Service, lists_all: bool) -> bool:
        """Return whether the root's list of models has the service: it is listed, or the caller was granted it."""
        is_listed = service.listed or lists_all or service.rules.need_proof(self.directory.default_access)
        return is_listed and self.may_use(service)

    def check_any(self) -> None:
        """Raise GatewayError if the client can use no service at all, whatever it names."""
        directory = self.directory
        if self.caller is None and 0 < len(directory.services) == directory.num_guarded:
            raise self.build_missing("every service needs a key", Code.MODEL_NOT_FOUND)

    def build_missing(self, message: str, code: Code, param: str | None = None) -> GatewayError:
        """Return the error for a service that does not exist or that the client may not see: both look the same.

        A client without proof gets 401 if any service needs one.
        """
        if self.caller is not None or not self.directory.num_guarded:
            return GatewayError(message, code, param)
        if self.is_pending:
            return GatewayError(
                f"the gateway is reading the cluster's new keys; retry: {self.problem}", Code.NOT_SYNCED
            )
        if self.problem:
            return GatewayError(f"{message}; {self.problem}", Code.INVALID_API_KEY)
        return GatewayError(f"{message}; if it needs a key: {_HOW}", Code.NO_API_KEY)
