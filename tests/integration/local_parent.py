"""A program that starts a local swarm, freezes a host and then waits to be killed or interrupted."""

import json
import threading

import swarm


def main() -> None:
    grid = swarm.ExpertGrid("ffn.[0:2]", "ffn", config={"hid": 8})
    with swarm.LocalSwarm([grid], hosts=2) as local:
        local.freeze("host-1")
        pids = [local.pid(name) for name in local.names()]
        print(json.dumps({"pids": pids, "directory": str(local.directory)}), flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
