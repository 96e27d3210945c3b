"""Settings of a draft service."""

from typing import Annotated, Literal

import msgspec

from streamserve.protocol.setting_types import PositiveFloat, Sequences, about


class DraftingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a draft service."""

    listen: Annotated[str, about("address for target servers, tcp://HOST:PORT; port 0: a free port")] = (
        "tcp://127.0.0.1:7700"
    )
    key: Annotated[
        str | None,
        about(
            "file with the service's key (see `streamserve keys new`); --clients must be given too; "
            "required unless --listen is a loopback address"
        ),
    ] = None
    clients: Annotated[
        str | None,
        about("file with the public keys of allowed target servers, one per line, each followed by a name"),
    ] = None
    share: Annotated[
        tuple[str, ...],
        about(
            "NAME=WEIGHT: weight of a target server when the service is shared, by default 1; may be given "
            "several times"
        ),
    ] = ()
    max_batch: Annotated[int, about("maximum number of target servers in a draft batch", ge=1, le=256)] = 16
    max_batch_ms: Annotated[
        PositiveFloat, about("maximum duration of a draft batch for several target servers, in milliseconds")
    ] = 50.0
    max_targets: Annotated[Sequences, about("maximum number of open sessions")] = 64
    admission: Annotated[
        bool,
        about(
            "refuse target servers beyond N_max, the maximum number that the service is estimated to speed up"
        ),
    ] = True
    rate: Annotated[PositiveFloat, about("maximum number of messages per second from one client")] = 2000.0
    lease: Annotated[
        PositiveFloat, about("seconds without a message after which a target server's session is closed")
    ] = 30.0
    keep_warm: Annotated[
        Literal["auto", "always", "never"],
        about(
            "run dummy passes in short idle gaps, which make the next draft passes faster; auto: only if "
            "measurements show that it helps"
        ),
    ] = "auto"
    metrics: Annotated[
        str | None, about("HOST:PORT at which Prometheus metrics are served; by default they are not served")
    ] = None
