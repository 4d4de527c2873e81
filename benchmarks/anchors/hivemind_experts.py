"""The workload of `benchmarks.experts` on hivemind 1.1.12: run with an interpreter that has it, not with swarm's.

    python hivemind_experts.py EXPERT HID BATCH

One server process and one client process; the client calls one of four experts at random, forward only and then
forward with backward (the server then steps SGD with learning rate 0). Prints one JSON line of median times.
"""

import json
import multiprocessing
import random
import statistics
import sys
import time

N_EXPERTS = 4
SECONDS = 4.0


def client(ready, addresses, peer_id, hid, batch, results):
    import torch

    torch.set_num_threads(1)
    from hivemind.moe.client.expert import RemoteExpert
    from hivemind.moe.client.remote_expert_worker import RemoteExpertWorker
    from hivemind.moe.expert_uid import ExpertInfo
    from hivemind.p2p import P2P

    p2p = RemoteExpertWorker.run_coroutine(P2P.create(initial_peers=addresses))
    infos = [ExpertInfo(uid=f"expert.{i}", peer_id=peer_id) for i in range(N_EXPERTS)]
    experts = [RemoteExpert(expert_info=info, p2p=p2p) for info in infos]
    x = torch.randn(batch, hid, requires_grad=True)
    results.put("up")
    ready.wait()
    times = {}
    for name in ("forward_ms", "both_ms"):
        for expert in experts:
            expert(x).sum().backward()
        taken, end = [], time.perf_counter() + SECONDS
        while time.perf_counter() < end or len(taken) < 5:
            begun = time.perf_counter()
            if name == "forward_ms":
                with torch.no_grad():
                    random.choice(experts)(x)
            else:
                random.choice(experts)(x).sum().backward()
            taken.append(time.perf_counter() - begun)
        times[name] = round(statistics.median(taken) * 1e3, 3)
    results.put(times)


def main():
    expert, hid, batch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    import torch
    from hivemind.dht import DHT
    from hivemind.moe.server import ModuleBackend, Server
    from hivemind.moe.server.layers import name_to_block
    from hivemind.utils.tensor_descr import BatchTensorDescriptor

    torch.set_num_threads(1)
    dht = DHT(start=True)
    ready, results = multiprocessing.Event(), multiprocessing.Queue()
    arguments = (ready, dht.get_visible_maddrs(), dht.peer_id, hid, batch, results)
    process = multiprocessing.Process(target=client, args=arguments, daemon=True)
    process.start()
    backends = {}
    for i in range(N_EXPERTS):
        module = name_to_block[expert](hid)
        parameters = list(module.parameters())
        backends[f"expert.{i}"] = ModuleBackend(
            name=f"expert.{i}",
            module=module,
            optimizer=torch.optim.SGD(parameters, lr=0.0) if parameters else None,
            args_schema=(BatchTensorDescriptor(hid),),
            outputs_schema=BatchTensorDescriptor(hid),
            max_batch_size=batch * 4,
        )
    server = Server(dht=dht, module_backends=backends, num_connection_handlers=1, device="cpu")
    server.start()
    server.ready.wait()
    assert results.get() == "up"
    ready.set()
    case = {"expert": expert, "hid": hid, "batch": batch, **results.get()}
    print(json.dumps(case), flush=True)
    server.shutdown()
    server.join()


if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    main()
