"""What a user does in a browser: log in, start a notebook server, run cells. By the hub's HTTP."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

import requests
import websocket

from tests.deploy.jupyterhub.centre import PASSWORD

LIMIT_S = 240.0
_tokens: dict[str, str] = {}
_kernels: dict[str, tuple[str, Any]] = {}


def answers(hub: str) -> bool:
    try:
        return requests.get(f"{hub}/hub/api/", timeout=5).ok
    except requests.RequestException:
        return False


def log_in(hub: str, user: str, password: str = PASSWORD) -> int:
    """The status of the hub's answer."""
    answer = requests.post(
        f"{hub}/hub/api/users/{user}/tokens",
        json={"auth": {"username": user, "password": password}},
        timeout=LIMIT_S,
    )
    if answer.ok:
        _tokens[user] = answer.json()["token"]
    return answer.status_code


def _ask(hub: str, user: str, method: str, path: str, **more: Any) -> requests.Response:
    head = {"Authorization": f"token {_tokens[user]}"}
    answer = requests.request(method, f"{hub}/{path}", headers=head, timeout=LIMIT_S, **more)
    answer.raise_for_status()
    return answer


def start_server(hub: str, user: str) -> float:
    """Start the user's notebook server; the seconds until it is ready."""
    begun = time.monotonic()
    while True:
        try:
            _ask(hub, user, "POST", f"hub/api/users/{user}/server")
            break
        except requests.HTTPError as error:  # the hub has not noticed that the one before is gone
            if error.response.status_code != 400 or time.monotonic() > begun + LIMIT_S:
                raise
        time.sleep(0.5)
    while (
        not _ask(hub, user, "GET", f"hub/api/users/{user}")
        .json()["servers"]
        .get("", {})
        .get("ready")
    ):
        if time.monotonic() > begun + LIMIT_S:
            raise TimeoutError(f"no notebook server of {user} after {LIMIT_S} s")
        time.sleep(0.1)
    return time.monotonic() - begun


def start_kernel(hub: str, user: str) -> None:
    """Open a notebook: start a kernel and connect to it."""
    ident = _ask(hub, user, "POST", f"user/{user}/api/kernels").json()["id"]
    address = f"{hub}/user/{user}/api/kernels/{ident}/channels".replace("http", "ws", 1)
    head = [f"Authorization: token {_tokens[user]}"]
    _kernels[user] = ident, websocket.create_connection(address, header=head, timeout=LIMIT_S)


def run(hub: str, user: str, cell: str) -> str:
    """Run a cell: what it prints, and the name and words of its error."""
    request, said = uuid.uuid4().hex, ""
    header = {"msg_id": request, "msg_type": "execute_request", "version": "5.3", "session": user}
    content = {"code": cell, "silent": False, "store_history": True, "stop_on_error": False}
    message = {"header": header, "parent_header": {}, "metadata": {}, "content": content}
    _, channels = _kernels[user]
    channels.send(json.dumps({**message, "channel": "shell"}))
    while True:
        told = json.loads(channels.recv())
        if told["parent_header"].get("msg_id") != request:
            if told["msg_type"] == "status" and told["content"]["execution_state"] == "restarting":
                return said + "killed"
            continue
        match told["msg_type"]:
            case "stream":
                said += told["content"]["text"]
            case "error":
                said += f"{told['content']['ename']}: {told['content']['evalue']}"
            case "status" if told["content"]["execution_state"] == "idle":
                return said
