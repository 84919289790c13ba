//! `Display` of a decoder: the tree that `quire plan --decoder` prints. Consecutive layers that differ only in their number are
//! printed once.

use std::fmt;

use super::{Attention, Decoder, Layer, Linear, Mixer, Mlp, Norm, Role, RopeScaling};

const LABEL_WIDTH: usize = 11;

/// A line of the tree and the lines below it.
#[derive(PartialEq)]
struct Node {
    text: String,
    children: Vec<Node>,
}

impl Node {
    fn new(label: &str, text: impl fmt::Display, children: Vec<Node>) -> Node {
        Node { text: format!("{label:<LABEL_WIDTH$}{text}"), children }
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
        let mut children = vec![linear("embedding", &self.embedding)];
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
        children.push(norm("final norm", &self.final_norm));
        children.push(match &self.head {
            Some(head) => linear("head", head),
            None => Node::new("head", "the embedding", Vec::new()),
        });
        let text = format!("{} layers, {} weights", self.layers.len(), self.num_parameters());
        let root = Node { text, children };
        f.write_str(&root.text)?;
        root.print(f, "")
    }
}

/// The branches of a layer, with names cut after the layer's number.
fn branches(layer: &Layer, number: usize) -> Vec<Node> {
    let mixer = |mixer: &Mixer| match mixer {
        Mixer::Attention(layer) => attention(layer),
        Mixer::Mlp(layer) => mlp(layer),
    };
    let mut nodes: Vec<Node> =
        layer.branches.iter().flat_map(|branch| [norm("norm", &branch.norm), mixer(&branch.mixer)]).collect();
    nodes.iter_mut().for_each(|node| cut_layer_number(node, number));
    nodes
}

fn cut_layer_number(node: &mut Node, number: usize) {
    if let Some((label, name)) = node.text.split_at_checked(LABEL_WIDTH)
        && let Some((_, rest)) = name.split_once(&format!(".{number}."))
    {
        node.text = format!("{label}{rest}");
    }
    node.children.iter_mut().for_each(|child| cut_layer_number(child, number));
}

fn attention(layer: &Attention) -> Node {
    let heads = layer.heads;
    let window = layer.window.map_or("the whole context".to_string(), |window| format!("window of {window} tokens"));
    let scaling = match &layer.rope.scaling {
        RopeScaling::None => String::new(),
        RopeScaling::Linear { factor } => format!(", linear scaling by {factor}"),
        RopeScaling::Llama3 { factor, .. } => format!(", llama3 scaling by {factor}"),
    };
    let mut children = vec![linear("qkv", &layer.qkv)];
    children.extend(layer.query_norm.iter().map(|it| norm("query norm", it)));
    children.extend(layer.key_norm.iter().map(|it| norm("key norm", it)));
    children.push(Node::new("rope", format!("theta {}{scaling}", layer.rope.theta), Vec::new()));
    children.push(linear("output", &layer.output));
    let text = format!(
        "{} query and {} key/value heads of {}, scale {}, {window}",
        heads.num_heads, heads.num_kv_heads, heads.head_dim, layer.scale
    );
    Node::new("attention", text, children)
}

fn mlp(layer: &Mlp) -> Node {
    let text = format!("{:?}, {} wide", layer.activation, layer.down.inputs).to_lowercase();
    Node::new("mlp", text, vec![linear("gate_up", &layer.gate_up), linear("down", &layer.down)])
}

fn norm(label: &str, norm: &Norm) -> Node {
    Node::new(label, format!("{} [{}] eps {:e}", norm.name, norm.width, norm.eps), Vec::new())
}

fn linear(label: &str, linear: &Linear) -> Node {
    let names: Vec<&str> = linear.parts.iter().map(|part| part.name.as_str()).collect();
    // All parts belong to one module, so the later ones are named by their last word.
    let rest = names.iter().skip(1).filter_map(|name| name.rsplit('.').next()).map(|word| format!(" + {word}"));
    let role = match linear.role {
        Role::Column => "column",
        Role::Row => "row",
    };
    let bias = if linear.bias { ", bias" } else { "" };
    let names = names.first().copied().unwrap_or_default().to_string() + &rest.collect::<String>();
    let text = format!("{names} [{}, {}] {}, {role}{bias}", linear.rows(), linear.inputs, linear.form);
    Node::new(label, text, Vec::new())
}
