//! Ids, revisions and names of files, and the paths that come of them.

use std::path::{Component, Path};

use hub::{ModelId, RepoPath, Revision};
use proptest::prelude::*;

#[test]
fn ids_follow_the_rules_of_the_hub() {
    for good in
        ["Qwen/Qwen3-0.6B", "a/b", "_x/y_", "org/name:file.gguf", "org/name:sub/file-00001-of-00002.gguf", "o/n:Q4_K_M"]
    {
        assert_eq!(good.parse::<ModelId>().unwrap().to_string(), good);
    }
    let long = format!("org/{}", "x".repeat(93));
    for bad in [
        "",
        "name",
        "/name",
        "org/",
        "org/a/b",
        "org/..",
        "../name",
        "./name",
        "org/.name",
        "org/name.",
        "-org/name",
        "org/name-",
        "org/na--me",
        "org/na..me",
        "org/name.git",
        "org/na me",
        "org/na\nme",
        "org/näme",
        "C:\\x",
        "org\\name",
        "org/name:",
        "org/name:../x.gguf",
        "org/name:/x.gguf",
        "org/name:a:b",
        "https://huggingface.co/org/name",
        &long,
    ] {
        let message = bad.parse::<ModelId>().unwrap_err().to_string();
        assert!(
            message.contains("expected a hub id such as Qwen/Qwen3-0.6B") && message.lines().count() == 1,
            "{message}"
        );
    }
}

#[test]
fn revisions_follow_the_rules_of_git() {
    for good in ["main", "v1.0", "refs/pr/1", "feature/x_y-z", "0123456789abcdef0123456789abcdef01234567"] {
        assert_eq!(good.parse::<Revision>().unwrap().as_str(), good);
    }
    for bad in [
        "", "..", "a..b", "/main", "main/", "a//b", ".x", "a/.x", "x.", "-x", "a b", "a\tb", "a~1", "a^", "a:b", "a?",
        "a*", "a[", "a\\b", "a\0",
    ] {
        assert!(bad.parse::<Revision>().unwrap_err().to_string().starts_with("--revision: found"), "{bad:?}");
    }
}

/// Text made of the pieces that paths are attacked with.
fn hostile() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        Just("..".to_string()),
        Just(".".to_string()),
        Just("/".to_string()),
        Just("\\".to_string()),
        Just(":".to_string()),
        Just("\0".to_string()),
        Just("~".to_string()),
        Just("--".to_string()),
        "[a-zA-Z0-9_.-]{1,4}",
        any::<char>().prop_map(String::from),
    ];
    proptest::collection::vec(piece, 0..8).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn an_accepted_name_stays_below_its_folder(text in hostile()) {
        let revision = text.parse::<Revision>().ok().map(|revision| revision.as_str().to_string());
        let model = text.parse::<ModelId>().ok();
        let gguf = model.as_ref().and_then(|model| model.gguf().map(str::to_string));
        let file = RepoPath::parse(&text).map(|path| path.as_str().to_string());
        for accepted in [revision, gguf, file].into_iter().flatten() {
            let path = Path::new("/cache").join(&accepted);
            prop_assert!(path.starts_with("/cache") && path != Path::new("/cache"), "{:?}", accepted);
            prop_assert!(Path::new(&accepted).components().all(|part| matches!(part, Component::Normal(_))), "{:?}", accepted);
            prop_assert!(!accepted.contains(['\0', '\\', '\n']), "{:?}", accepted);
        }
        if let Some(model) = model {
            // The name of the folder is one part, and tells the id.
            let folder = model.repo().replace('/', "--");
            prop_assert_eq!(folder.split("--").collect::<Vec<_>>().join("/"), model.repo());
            prop_assert!(!folder.contains('/') && folder.split("--").count() == 2);
        }
    }
}
