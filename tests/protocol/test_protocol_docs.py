"""docs/protocol.md agrees with the code: these tests read its lists and compare them."""

import re
from pathlib import Path
from typing import get_args

from serve_app.links.protocol import errors
from serve_app.links.protocol.connection import IngressConnection, ReplicaConnection
from serve_app.links.protocol.errors import ProtocolError
from serve_app.links.protocol.messages import Capabilities, Message
from tests.protocol.helpers import make_ingress, make_replica, outputs

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")


def test_the_error_table_lists_every_code_once() -> None:
    listed = re.findall(r"^\| `(\w+)` \| (\w+) \| .+ \| .+ \|$", PAGE, flags=re.MULTILINE)
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ProtocolError)]
    assert sorted(listed) == sorted((kind.code, kind.__name__) for kind in kinds if kind is not ProtocolError)


def test_the_message_table_lists_every_message_with_its_fields_in_order() -> None:
    rows = re.findall(r"^\| (\d+) \| (\w+) \| (\w+) \| (.*?) ?\|", PAGE, flags=re.MULTILINE)
    listed = [(int(number), name, tuple(re.findall(r"`(\w+)`", fields))) for number, name, _, fields in rows]
    assert listed == [(m.__struct_config__.tag, m.__name__, m.__struct_fields__) for m in get_args(Message)]


def test_the_message_table_gives_the_right_direction() -> None:
    rows = re.findall(r"^\| \d+ \| (\w+) \| (\w+) \|", PAGE, flags=re.MULTILINE)
    taken_when_open = {
        **{kind.__name__: "ingress" for kind in ReplicaConnection._received_when_open},
        **{kind.__name__: "replica" for kind in IngressConnection._received_when_open},
    }
    handshake = {"Hello": "ingress", "Challenge": "replica", "Proof": "ingress", "Goodbye": "either"}
    assert dict(rows) == taken_when_open | handshake


def test_the_capabilities_are_listed_in_order() -> None:
    match = re.search(r"^`capabilities` is an array of (.+);$", PAGE, flags=re.MULTILINE)
    assert match
    assert tuple(re.findall(r"`(\w+)`", match[1])) == Capabilities.__struct_fields__


def test_the_example_is_what_the_connections_send() -> None:
    listed: dict[str, str] = {}
    name = ""
    for title, line in re.findall(r"^(\w+| )  +((?:[0-9a-f]{2,}(?: |$))+)", PAGE, flags=re.MULTILINE):
        name = title.strip() or name
        listed[name] = listed.get(name, "") + line.replace(" ", "")
    ingress, replica = make_ingress(), make_replica()
    sent = {"Hello": ingress.initiate()}
    replica.receive_data(sent["Hello"])
    sent["Challenge"] = replica.data_to_send()
    ingress.receive_data(sent["Challenge"])
    sent["Proof"] = ingress.data_to_send()
    replica.receive_data(sent["Proof"])
    sent["Add"] = ingress.send_add("r1@0", [b"abc"])
    sent["Outputs"] = outputs(b"xyz")
    sent["Goodbye"] = replica.close("shutdown", "drained")
    assert listed == {name: wire.hex() for name, wire in sent.items()}
