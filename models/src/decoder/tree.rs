//! `Display` of a decoder: the tree that `quire plan --decoder` prints. Consecutive layers that differ only in their number are
//! printed once.

use std::fmt;

use super::{
    Attention, Branch, Decoder, Experts, Layer, Linear, Mixer, Mlp, Norm, NormKind, Recurrent, Role, Rope, RopeScaling,
    Rule,
};

/// Width of the names; a longer one is followed by a space, too.
const LABEL_WIDTH: usize = 10;

/// A line of the tree and the lines below it.
#[derive(PartialEq)]
struct Node {
    text: String,
    children: Vec<Node>,
}

impl Node {
    fn new(label: &str, text: impl fmt::Display, children: Vec<Node>) -> Node {
        Node { text: format!("{label:<LABEL_WIDTH$} {text}"), children }
    }

    fn print(&self, f: &mut fmt::Formatter<'_>, indent: &str) -> fmt::Result {
        for (i, child) in self.children.iter().enumerate() {
            let (branch, below) = if i + 1 < self.children.len() { ("├─ ", "│  ") } else { ("└─ ", "   ") };
            write!(f, "\n{indent}{branch}{}", child.text)?;
            child.print(f, &format!("{indent}{below}"))?;
        }
        Ok(())
    }
}

impl fmt::Display for Decoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut children = self.embedding_nodes();
        let mut runs: Vec<(usize, usize, Vec<Node>)> = Vec::new();
        for (number, layer) in self.layers.iter().enumerate() {
            let nodes = branches(layer, number);
            match runs.last_mut() {
                Some((_, last, same)) if *same == nodes => *last = number,
                _ => runs.push((number, number, nodes)),
            }
        }
        children.extend(runs.into_iter().map(|(first, last, children)| {
            let text = if first == last { format!("layer {first}") } else { format!("layers {first} to {last}") };
            Node { text, children }
        }));
        children.extend(self.final_norm.iter().map(|it| norm("final norm", it)));
        children.extend(self.head.projection.iter().map(|it| {
            let mut node = linear("head input", it);
            node.text += &self.head.activation.map_or(String::new(), |activation| format!(", {activation:?}"));
            node
        }));
        let mut head = match &self.head.linear {
            Some(head) => linear("head", head),
            None => Node::new("head", "the embedding", Vec::new()),
        };
        head.text += &factor(self.head.scale);
        head.text += &cap(self.head.soft_cap);
        if !self.head.masked.is_empty() {
            head.text += &format!(", {} rows without a token", self.head.masked.len());
        }
        children.push(head);
        let text = format!("{} layers, {} weights", self.layers.len(), self.num_parameters());
        let root = Node { text, children };
        f.write_str(&root.text)?;
        root.print(f, "")
    }
}

impl Decoder {
    fn embedding_nodes(&self) -> Vec<Node> {
        let embedding = &self.embedding;
        let mut tokens = linear("embedding", &embedding.tokens);
        tokens.text += &factor(embedding.scale);
        let mut nodes = vec![tokens];
        nodes.extend(embedding.positions.iter().map(|positions| {
            let mut node = linear("positions", &positions.table);
            node.text += &format!(", offset {}", positions.offset);
            node
        }));
        if let Some(beside) = &embedding.beside {
            let mut children = vec![norm("token norm", &beside.token_norm)];
            children.extend(beside.token.iter().map(|it| linear("token", it)));
            children.extend(beside.state_norm.iter().map(|it| norm("state norm", it)));
            children.extend(beside.states.iter().map(|it| linear("state", it)));
            nodes.push(Node::new("states", format!("{} of another decoder", beside.states.len()), children));
        }
        nodes.extend(embedding.projection.iter().map(|it| linear("projection", it)));
        nodes.extend(embedding.norm.iter().map(|it| norm("norm", it)));
        nodes.extend(self.streams.iter().map(|it| {
            let parts = [linear("project", &it.project)].into_iter();
            let parts = parts.chain(it.merge.first().map(|it| linear("merge", it))).collect();
            Node::new("streams", format!("{} beside the first", it.merge.len()), parts)
        }));
        nodes.extend(embedding.per_layer.iter().map(|it| {
            let children =
                vec![linear("tokens", &it.tokens), linear("projection", &it.projection), norm("norm", &it.norm)];
            Node::new("per layer", format!("{} inputs", it.width), children)
        }));
        nodes
    }
}

/// The branches of a layer, with names cut after the layer's number.
fn branches(layer: &Layer, number: usize) -> Vec<Node> {
    let parallel = |number: usize| if number < layer.parallel { ", parallel" } else { "" };
    let of_branches = layer.branches.iter().enumerate().flat_map(|(number, branch)| nodes_of(branch, parallel(number)));
    let mixing = layer.mixing.iter().map(|it| {
        let parts = vec![norm("norm", &it.norm), linear("router", &it.router)];
        Node::new("mixing", format!("of {} streams", it.router.rows()), parts)
    });
    let mut nodes: Vec<Node> = mixing.chain(of_branches).collect();
    nodes.extend(layer.scalar.iter().map(|name| Node::new("factor", name, Vec::new())));
    nodes.iter_mut().for_each(|node| cut_layer_number(node, number));
    nodes
}

fn nodes_of(branch: &Branch, parallel: &str) -> Vec<Node> {
    let mut nodes: Vec<Node> = branch.norm.iter().map(|it| norm("norm", it)).collect();
    let mut node = match &branch.mixer {
        Mixer::Attention(layer) => attention(layer),
        Mixer::Recurrent(layer) => recurrent(layer),
        Mixer::Mlp(layer) => mlp(layer),
        Mixer::Experts(layer) => experts(layer),
        Mixer::Sum(branches) => Node::new("sum", "", branches.iter().flat_map(|branch| nodes_of(branch, "")).collect()),
        Mixer::Laurel(layer) => {
            let parts = vec![linear("left", &layer.left), linear("right", &layer.right), norm("norm", &layer.norm)];
            Node::new("laurel", format!("{} wide, plus the input", layer.left.rows()), parts)
        }
        Mixer::PerLayer(layer) => {
            let text = format!("{:?} of gate, times inputs of the layer", layer.activation).to_lowercase();
            Node::new("per layer", text, vec![linear("gate", &layer.gate), linear("projection", &layer.projection)])
        }
    };
    node.text += &factor(branch.scale);
    node.text += parallel;
    if branch.stream_scale != 1.0 {
        node.text += &format!(", then the stream times {}", branch.stream_scale);
    }
    nodes.push(node);
    nodes.extend(branch.norm_after.iter().map(|it| norm("norm after", it)));
    nodes.extend(branch.stream_norm.iter().map(|it| norm("sum norm", it)));
    nodes
}

fn factor(factor: f32) -> String {
    if factor == 1.0 { String::new() } else { format!(", times {factor}") }
}

fn cap(cap: Option<f32>) -> String {
    cap.map_or(String::new(), |cap| format!(", capped at {cap}"))
}

fn cut_layer_number(node: &mut Node, number: usize) {
    if let Some((before, rest)) = node.text.split_once(&format!(".{number}."))
        && let Some(space) = before.rfind(' ')
    {
        node.text = format!("{}{rest}", &before[..=space]);
    }
    node.children.iter_mut().for_each(|child| cut_layer_number(child, number));
}

fn attention(layer: &Attention) -> Node {
    let heads = layer.heads;
    let window = layer.window.map_or("the whole context".to_string(), |window| format!("window of {window} tokens"));
    let mut children = vec![linear("qkv", &layer.qkv)];
    children.extend(layer.beside.iter().map(|it| linear("of token", it)));
    let after = if layer.norm_after_rope { " after rope" } else { "" };
    let norms = [("query norm", &layer.query_norm), ("key norm", &layer.key_norm), ("value norm", &layer.value_norm)];
    children.extend(norms.into_iter().filter_map(|(label, it)| it.as_ref().map(|it| norm(label, it))));
    children.push(Node::new(
        "rope",
        layer.rope.as_ref().map_or("none".to_string(), |it| rope(it, heads.head_dim)),
        vec![],
    ));
    children.push(linear("output", &layer.output));
    let mut text = format!(
        "{} query and {} key/value heads of {}, scale {}, {window}{after}",
        heads.num_heads, heads.num_kv_heads, heads.head_dim, layer.scale
    );
    text += &cap(layer.soft_cap);
    text += &layer.sparse.map_or(String::new(), |sparse| {
        let (local, stride) = (sparse.local_blocks, sparse.vertical_stride);
        format!(", {local} local and every block in {stride} of {} tokens", sparse.block_size)
    });
    text += &layer.value_dim.map_or(String::new(), |dim| format!(", values of {dim}"));
    text += &layer.clip.map_or(String::new(), |clip| format!(", clipped at {clip}"));
    if let Some(latent) = &layer.latent {
        let down = latent.query_down.iter().flat_map(|(down, it)| [linear("query down", down), norm("norm", it)]);
        let sizes = format!("{} of {} dims", latent.absorb.len(), latent.rank);
        children.splice(0..0, down.chain([linear("query", &latent.query)]));
        children.push(norm("latent norm", &latent.norm));
        children.push(Node::new("latent", format!("{sizes}, values of {}", latent.value_dim), Vec::new()));
        if let Some(indexer) = latent.indexer() {
            let parts = [("query", &indexer.query), ("weights", &indexer.weights)].map(|(label, it)| linear(label, it));
            let parts = parts.into_iter().chain([norm("key norm", &indexer.norm)]).collect();
            children.push(Node::new("indexer", format!("{} heads of {}", indexer.heads, indexer.dim), parts));
        }
        text += &latent.choice.as_ref().map_or(String::new(), |choice| {
            let before = if latent.indexer().is_none() { ", chosen before" } else { "" };
            format!(", {} tokens{before}", choice.top_k())
        });
    }
    let flags = [(layer.alibi_slopes.is_some(), ", ALiBi"), (layer.sinks.is_some(), ", sinks"), (layer.gate, ", gate")];
    flags.iter().filter(|(has, _)| *has).for_each(|(_, name)| text += name);
    text += &layer.shares.map_or(String::new(), |layer| format!(", keys and values of layer {layer}"));
    text += &layer.query_growth.map_or(String::new(), |growth| {
        format!(", queries grow by {} from {}", growth.beta, growth.original_max_position_embeddings)
    });
    Node::new("attention", text, children)
}

fn recurrent(layer: &Recurrent) -> Node {
    let Recurrent { key_heads, value_heads, key_dim, value_dim, kernel, .. } = layer;
    let name = match layer.rule {
        Rule::GatedDelta { .. } => "gated delta net",
        Rule::ShortConvolution => "short convolution",
        Rule::StateSpace { .. } => "state space",
        Rule::Selective(_) => "selective state space",
        Rule::ChannelDelta(_) => "delta net with decays of channels",
    };
    let heads = match key_dim {
        0 => format!("{} channels", layer.value_width()),
        _ => format!("{key_heads} key heads of {key_dim} and {value_heads} value heads of {value_dim}"),
    };
    let bytes = layer.state_bytes();
    let text = format!("{name}, {heads}, convolution over {kernel} tokens, state of {bytes} bytes");
    let mut children = vec![linear("projections", &layer.projections)];
    if let Rule::Selective(rule) = &layer.rule {
        let [of_k, of_q] = &rule.key_norms;
        children.extend([linear("low", &rule.low), norm("norm", &rule.low_norm), linear("step", &rule.step)]);
        children.extend([linear("keys", &rule.keys), norm("key norm", of_k), norm("query norm", of_q)]);
    }
    if let Rule::ChannelDelta(rule) = &layer.rule {
        let names = ["decay low", "decay", "gate low", "gate"];
        children.extend(names.iter().zip(rule.decay.iter().chain(&rule.gate)).map(|(name, of)| linear(name, of)));
    }
    children.extend(layer.norm.iter().map(|it| norm("norm", it)));
    children.push(linear("output", &layer.output));
    Node::new("recurrent", text, children)
}

fn rope(rope: &Rope, head_dim: usize) -> String {
    let scaling = match &rope.scaling {
        RopeScaling::None => String::new(),
        RopeScaling::Linear { factor } => format!(", linear scaling by {factor}"),
        RopeScaling::Proportional { pairs, .. } => format!(", the first {pairs} pairs"),
        RopeScaling::Llama3 { factor, .. } => format!(", llama3 scaling by {factor}"),
        RopeScaling::Dynamic { factor, context, .. } => format!(", dynamic scaling by {factor} for {context} tokens"),
        RopeScaling::Yarn { factor, .. } => format!(", yarn scaling by {factor}"),
        RopeScaling::LongRope { context, .. } => format!(", longrope for {context} tokens"),
    };
    let part = if rope.dims == head_dim { String::new() } else { format!(", {} of {head_dim}", rope.dims) };
    let pairs = if rope.interleaved { ", neighbours" } else { "" };
    format!("theta {}{part}{pairs}{scaling}", rope.theta)
}

fn mlp(layer: &Mlp) -> Node {
    let gate = if layer.gated { "" } else { ", no gate" };
    let mut text = format!("{:?}, {} wide{gate}", layer.activation, layer.width()).to_lowercase();
    text += &layer.sparsity.map_or(String::new(), |it| format!(", gates from {it} deviations above the mean"));
    Node::new("mlp", text, vec![linear("gate_up", &layer.gate_up), linear("down", &layer.down)])
}

fn experts(layer: &Experts) -> Node {
    let routing = &layer.routing;
    let mut text = format!("{} of {}, {:?}", routing.top_k, layer.experts.len(), routing.scores).to_lowercase();
    text += &routing.groups.map_or(String::new(), |groups| format!(", {} of {} groups", groups.top, groups.count));
    text += if routing.choice_bias.is_some() { ", bias" } else { "" };
    text += if routing.renormalise { ", renormalised" } else { "" };
    text += &factor(routing.scale);
    text += if routing.expert_scale.is_some() { ", scales" } else { "" };
    let mut children: Vec<Node> = layer.router_norm.iter().map(|it| norm("norm", it)).collect();
    children.push(linear("router", &layer.router));
    children.extend(layer.narrow.iter().flat_map(|[into, out]| [linear("narrow", into), linear("widen", out)]));
    // All experts are alike.
    children.extend(layer.experts.first().map(mlp));
    children.extend(layer.shared.iter().map(|shared| {
        let gate = if layer.shared_gate { ", gated" } else { "" };
        let Node { text, children } = mlp(shared);
        Node::new("shared", text.trim_start_matches("mlp").trim_start().to_string() + gate, children)
    }));
    Node::new("experts", text, children)
}

fn norm(label: &str, norm: &Norm) -> Node {
    let kind = match norm.kind {
        NormKind::Rms => "",
        NormKind::Layer => ", layer norm",
    };
    let one = if norm.plus_one { ", plus 1" } else { "" };
    let name = norm.weight.first().map_or("no weights", String::as_str);
    let count = norm.shape.iter().product::<usize>() * norm.weight.len().max(1);
    let bias = if norm.bias.is_some() { ", bias" } else { "" };
    let width = if count == norm.width { String::new() } else { format!(" of {}", norm.width) };
    Node::new(
        label,
        format!("{name} [{count}]{width} eps {:e}{kind}{one}{bias}{}", norm.eps, factor(norm.factor)),
        Vec::new(),
    )
}

fn linear(label: &str, linear: &Linear) -> Node {
    let names: Vec<&str> = linear.parts.iter().map(|part| part.name.as_str()).collect();
    // All parts belong to one module, so the later ones are named by their last word.
    let rest = names.iter().skip(1).filter_map(|name| name.rsplit('.').next()).map(|word| format!(" + {word}"));
    let role = match linear.role {
        Role::Column => "column",
        Role::Row => "row",
        Role::Replicated => "replicated",
    };
    let bias = if linear.bias { ", bias" } else { "" };
    let names = names.first().copied().unwrap_or_default().to_string() + &rest.collect::<String>();
    let text = format!("{names} [{}, {}] {}, {role}{bias}", linear.rows(), linear.inputs, linear.form);
    Node::new(label, text, Vec::new())
}
