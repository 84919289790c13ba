//! Which weights are downloaded, by the names of the files.

use crate::common::{Hub, fetch};

/// The name of what a loader opens (`.` for the folder), or the message.
fn opened(names: &[&str], id: &str) -> Result<String, String> {
    let files: Vec<(&str, &[u8])> = names.iter().map(|name| (*name, name.as_bytes())).collect();
    let hub = Hub::new(&files);
    let path = fetch(&hub.options(), id).map_err(|error| error.to_string())?;
    let folder = hub.cached("snapshots").join(crate::common::COMMIT);
    let name = path.strip_prefix(&folder).unwrap().to_str().unwrap().to_string();
    // Offline, the cache gives the same.
    assert_eq!(fetch(&hub.options_with(&[("HF_HUB_OFFLINE", "1")]), id).unwrap(), path);
    Ok(if name.is_empty() { ".".to_string() } else { name })
}

const SETTINGS: [&str; 2] = ["config.json", "tokenizer.json"];

#[test]
fn safetensors_are_preferred_and_never_a_pickle() {
    let with = |more: &[&str]| opened(&[&SETTINGS[..], more].concat(), "org/name");
    assert_eq!(with(&["model.safetensors", "model.gguf", "pytorch_model.bin"]).unwrap(), ".");
    assert_eq!(with(&["model.gguf", "pytorch_model.bin"]).unwrap(), "model.gguf");
    for pickles in [&["pytorch_model.bin"][..], &["model.pt", "x.pth", "x.pkl"], &["consolidated.00.pth"]] {
        let message = with(pickles).unwrap_err();
        assert!(message.starts_with("org/name: found config.json, ") && message.contains("never loaded"), "{message}");
    }
    // An adapter alone.
    assert_eq!(opened(&["adapter_config.json", "adapter_model.safetensors"], "org/name").unwrap(), ".");
}

#[test]
fn a_gguf_file_is_named_by_its_path_or_its_quantisation() {
    let names = [
        "a-Q4_K_M.gguf",
        "a-Q8_0.gguf",
        "a-UD-Q8_0.gguf",
        "BF16/a-BF16-00001-of-00002.gguf",
        "BF16/a-BF16-00002-of-00002.gguf",
        "mmproj-F16.gguf",
        "a-F16.gguf",
        "imatrix.gguf",
        "README.md",
        "config.json",
    ];
    let open = |wanted: &str| opened(&names, &format!("org/name:{wanted}"));
    for (wanted, file) in [
        ("a-Q4_K_M.gguf", "a-Q4_K_M.gguf"),
        ("q4_k_m", "a-Q4_K_M.gguf"),
        ("F16", "a-F16.gguf"),
        ("UD-Q8_0", "a-UD-Q8_0.gguf"),
        ("BF16", "BF16/a-BF16-00001-of-00002.gguf"),
        ("BF16/a-BF16-00001-of-00002.gguf", "BF16/a-BF16-00001-of-00002.gguf"),
    ] {
        assert_eq!(open(wanted).unwrap(), file, "{wanted}");
    }
    let message = open("Q8_0").unwrap_err();
    assert_eq!(message, "org/name has several GGUF files, choose one of them: a-Q8_0.gguf, a-UD-Q8_0.gguf");
    for absent in ["Q5_0", "Q4_K", "Q4", "b.gguf", "Q4_K_M.gguf"] {
        let message = open(absent).unwrap_err();
        assert!(message.starts_with(&format!("org/name has no GGUF file {absent:?}; it has ")), "{message}");
    }
    let message = opened(&names, "org/name").unwrap_err();
    assert!(message.contains("several GGUF files") && !message.contains("mmproj"), "{message}");
    // All parts of a split file are needed.
    let message = opened(&["x-00001-of-00003.gguf", "x-00003-of-00003.gguf"], "org/name").unwrap_err();
    assert!(message.contains("has no file x-00002-of-00003.gguf"), "{message}");
}

#[test]
fn a_cached_gguf_file_is_no_answer_to_an_id_without_one_while_the_hub_can_be_asked() {
    let hub = Hub::scripted(&[("a-Q4_0.gguf", b"four"), ("a-Q8_0.gguf", b"eight")], |request| {
        let is_listing = request.path.ends_with(crate::common::COMMIT);
        is_listing.then(|| crate::common::listing(["a-Q4_0.gguf", "a-Q8_0.gguf"]))
    });
    let mut options = hub.options();
    options.revision = crate::common::COMMIT.parse().unwrap();
    assert!(fetch(&options, "org/name:Q8_0").unwrap().ends_with("a-Q8_0.gguf"));
    let before = hub.requests().len();
    assert!(fetch(&options, "org/name:Q8_0").unwrap().ends_with("a-Q8_0.gguf"));
    assert_eq!(hub.requests().len(), before);
    assert!(fetch(&options, "org/name").unwrap_err().to_string().contains("several GGUF files"));
}
