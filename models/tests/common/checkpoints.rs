//! What is expected of the reference checkpoints, and altered copies of them.
#![allow(dead_code, clippy::unwrap_used)] // each test program uses its part

use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;
use testkit::reference::folder;

/// The expected results of a reference case.
pub fn expected(case: &str) -> Value {
    serde_json::from_slice(&fs::read(folder(case).join("expected.json")).unwrap()).unwrap()
}

/// The entries of a JSON list.
pub fn list(value: &Value) -> &Vec<Value> {
    value.as_array().unwrap()
}

pub fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

pub fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

/// A checkpoint in a temporary folder, to be damaged.
pub struct Copy(TempDir);

impl Copy {
    pub fn of(case: &str) -> Copy {
        let copy = Copy(TempDir::new().unwrap());
        for entry in fs::read_dir(folder(case)).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), copy.path(entry.file_name().to_str().unwrap())).unwrap();
        }
        copy
    }

    pub fn path(&self, file: &str) -> PathBuf {
        self.0.path().join(file)
    }

    pub fn folder(&self) -> &Path {
        self.0.path()
    }

    pub fn write(self, file: &str, contents: impl AsRef<[u8]>) -> Copy {
        let path = self.path(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, contents).unwrap();
        self
    }

    pub fn remove(self, file: &str) -> Copy {
        fs::remove_file(self.path(file)).unwrap();
        self
    }

    pub fn edit(self, file: &str, edit: impl FnOnce(&mut Value)) -> Copy {
        let text = fs::read_to_string(self.path(file)).unwrap();
        // Python writes a bare word.
        let standard = || text.replace("Infinity", r#"{"__float__": "Infinity"}"#);
        let mut json = serde_json::from_str(&text).or_else(|_| serde_json::from_str(&standard())).unwrap();
        edit(&mut json);
        let text = serde_json::to_string_pretty(&json).unwrap();
        self.write(file, text)
    }

    /// Replaces keys of a JSON object, or of the text part of a multimodal one; `null` stays `null`.
    pub fn set(self, file: &str, keys: Value) -> Copy {
        self.edit(file, |json| {
            let part = if json.get("text_config").is_some() { &mut json["text_config"] } else { json };
            part.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        })
    }

    pub fn drop_key(self, file: &str, key: &str) -> Copy {
        self.edit(file, |json| {
            json.as_object_mut().unwrap().shift_remove(key);
        })
    }
}

/// The message of an error, which must be one line that names the file and each of `parts`.
pub fn message<T, E: Display>(result: Result<T, E>, parts: &[&str]) -> String {
    let message = result.err().unwrap().to_string();
    assert!(!message.contains('\n') && !message.is_empty(), "not one line: {message:?}");
    for part in parts {
        assert!(message.contains(part), "{message:?} does not say {part:?}");
    }
    message
}
