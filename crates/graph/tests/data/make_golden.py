"""Writes the golden files of the graph engine: models, graphs, samples and the embeddings that PyTorch Geometric computes.

    python make_golden.py

needs torch, torch_geometric, safetensors and networkx. Random power-law graphs, and one real one: Les Miserables (D. Knuth,
77 characters, 254 pairs that meet), which networkx carries. Sampled neighbourhoods are those of the engine's own sampler,
written again here from its description, so that both sides use the same samples.
"""
import json
import os

import networkx as nx
import numpy as np
import torch
from safetensors.torch import save_file
from torch_geometric.nn import GCNConv, SAGEConv

HERE = os.path.dirname(os.path.abspath(__file__))
MASK = (1 << 64) - 1


def mix(z):
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def sample(neighbours, fan_out, seed, node, layer):
    if len(neighbours) <= fan_out:
        return list(neighbours)
    state = mix(seed ^ mix((layer << 32) | node))
    places = []
    for last in range(len(neighbours) - fan_out, len(neighbours)):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        place = (mix(state) * (last + 1)) >> 64
        places.append(place if place not in places else last)
    return [neighbours[place] for place in sorted(places)]


def sampled_edges(edge_index, num_nodes, fan_outs, seed):
    """One edge_index for each layer."""
    lists = [[] for _ in range(num_nodes)]
    for source, target in edge_index.t().tolist():
        lists[target].append(source)
    layers = []
    for layer in range(len(fan_outs)):
        fan_out = fan_outs[len(fan_outs) - 1 - layer]
        edges = []
        for node in range(num_nodes):
            for source in sample(sorted(lists[node]), fan_out, seed, node, layer):
                edges.append((source, node))
        layers.append(torch.tensor(edges, dtype=torch.long).t().contiguous())
    return layers


def graphs():
    random = np.random.default_rng(7)
    scale_free = nx.barabasi_albert_graph(150, 3, seed=5)
    edges = np.array([pair for a, b in scale_free.edges for pair in ((a, b), (b, a))]).T
    yield "power-law", 150, edges, random.standard_normal((150, 20)).astype(np.float32)
    # Directed, with loops, parallel edges and nodes without any.
    heads = (random.pareto(1.2, 600) * 4).astype(np.int64) % 110
    tails = random.integers(0, 100, 600)
    edges = np.stack([tails, heads])
    yield "directed", 120, edges, random.standard_normal((120, 20)).astype(np.float32)
    novel = nx.convert_node_labels_to_integers(nx.les_miserables_graph())
    edges = np.array([pair for a, b in novel.edges for pair in ((a, b), (b, a))]).T
    yield "les-miserables", novel.number_of_nodes(), edges, random.standard_normal((77, 20)).astype(np.float32)


def models():
    torch.manual_seed(3)
    widths = [20, 24, 12]
    pairs = list(zip(widths, widths[1:]))
    yield "sage-mean", [SAGEConv(a, b) for a, b in pairs], {"aggr": "mean"}
    yield "sage-max", [SAGEConv(a, b, aggr="max") for a, b in pairs], {"aggr": "max"}
    yield "sage-max-project", [SAGEConv(a, b, aggr="max", project=True) for a, b in pairs], {"aggr": "max"}
    yield "sage-normalize", [SAGEConv(a, b, normalize=True) for a, b in pairs], {"aggr": "mean", "normalize": True}
    yield "sage-no-root", [SAGEConv(a, b, root_weight=False) for a, b in pairs], {"aggr": "mean"}
    yield "gcn", [GCNConv(a, b) for a, b in pairs], {}


def run(convs, x, layers):
    for number, (conv, edge_index) in enumerate(zip(convs, layers)):
        x = conv(x, edge_index)
        if number + 1 < len(convs):
            x = x.relu()
    return x


def main():
    tensors, cases = {}, []
    all_graphs = list(graphs())
    for name, num_nodes, edges, x in all_graphs:
        tensors[f"graph.{name}.edges"] = torch.tensor(edges, dtype=torch.float32).contiguous()
        tensors[f"graph.{name}.x"] = torch.tensor(x)
    for model, convs, config in models():
        state = {f"convs.{i}.{name}": value.detach().clone() for i, conv in enumerate(convs)
                 for name, value in conv.state_dict().items()}
        for conv in convs:
            conv.eval()
        save_file(state, os.path.join(HERE, f"{model}.safetensors"))
        for name, num_nodes, edges, x in all_graphs:
            edge_index = torch.tensor(edges)
            if model == "gcn":
                # As the engine: loops leave before neighbours are drawn.
                edge_index = edge_index[:, edge_index[0] != edge_index[1]]
            for fan_outs in ([], [3, 5]):
                layers = sampled_edges(edge_index, num_nodes, fan_outs, 42) if fan_outs else [edge_index] * 2
                with torch.no_grad():
                    out = run(convs, torch.tensor(x), layers)
                key = f"out.{len(cases)}"
                tensors[key] = out
                cases.append({"model": model, "config": config, "graph": name, "fan_outs": fan_outs, "out": key})
    save_file(tensors, os.path.join(HERE, "golden.safetensors"))
    with open(os.path.join(HERE, "golden.json"), "w") as file:
        json.dump(cases, file, indent=1)


main()
