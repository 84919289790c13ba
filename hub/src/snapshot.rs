//! What the cache has of a commit: enough to load it, or all of it.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::de::{self, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::cache::Repo;
use crate::error::{HubError, at, shown};
use crate::id::{Commit, ModelId};
use crate::path::RepoPath;
use crate::select::{self, Weights};

/// Largest index of shards, in bytes.
const MAX_INDEX_BYTES: u64 = 64 << 20;
/// Most files of weights.
pub(crate) const MAX_SHARDS: usize = 4096;
/// Most files of a snapshot that are looked at, and the depth of its folders.
const MAX_FILES: usize = 100_000;
const MAX_DEPTH: usize = 4;

/// State of the snapshot of one commit.
#[derive(Debug)]
pub(crate) struct Snapshot {
    /// What a loader opens: the folder, or the first GGUF file.
    pub path: PathBuf,
    /// A file that loading needs and that is not cached.
    pub missing: Option<String>,
    /// Whether it is certain that every file which a download would bring is cached.
    pub is_whole: bool,
}

impl Snapshot {
    /// Looks at the cached files of a commit. Makes no request.
    pub fn read(repo: &Repo, commit: &Commit, model: &ModelId) -> Result<Snapshot, HubError> {
        let folder = repo.snapshot(commit);
        let mut files = BTreeSet::new();
        list(&folder, "", MAX_DEPTH, &mut files);
        let names: BTreeSet<&str> = files.iter().map(String::as_str).collect();
        let (_, without) = select::settings(&names);
        let unknown: Vec<&RepoPath> = without.iter().filter(|file| !repo.is_absent(commit, file)).collect();
        let lacks = |name: &str| unknown.iter().any(|file| file.as_str() == name).then(|| name.to_string());
        let (path, missing, is_certain) = match select::weights(&names, model.gguf()) {
            Ok(Weights::Gguf(parts)) => {
                let first = parts.first().map_or_else(|| folder.clone(), |first| first.below(&folder));
                // Without a name, the repository may have other weights, which come first or are a choice.
                (first, None, model.gguf().is_some())
            }
            Ok(Weights::Single(_)) => (folder, lacks("config.json").or_else(|| lacks("tokenizer.json")), true),
            Ok(Weights::Sharded { index }) => {
                let shards = shards(&index.below(&folder))?;
                let shard = shards.iter().find(|shard| !names.contains(shard.as_str())).map(ToString::to_string);
                (folder, shard.or_else(|| lacks("config.json")).or_else(|| lacks("tokenizer.json")), true)
            }
            Err(select::Unusable::NoPart(part)) => (folder, Some(part), true),
            Err(select::Unusable::SeveralGguf(choices)) => (folder, Some(format!("a single one of {choices}")), true),
            Err(_) => (folder, Some(model.gguf().unwrap_or("model.safetensors").to_string()), true),
        };
        let is_whole = missing.is_none() && is_certain && unknown.is_empty();
        Ok(Snapshot { path, missing, is_whole })
    }
}

/// The shards that an index file names, each once.
pub(crate) fn shards(index: &Path) -> Result<Vec<RepoPath>, HubError> {
    let damaged = |problem: String| HubError::Cache { path: index.to_path_buf(), problem };
    let mut bytes = Vec::new();
    let file = File::open(index).map_err(at(index))?;
    file.take(MAX_INDEX_BYTES + 1).read_to_end(&mut bytes).map_err(at(index))?;
    if bytes.len() as u64 > MAX_INDEX_BYTES {
        return Err(damaged(format!("found more than {MAX_INDEX_BYTES} bytes, expected an index of shards")));
    }
    let parsed: Index = serde_json::from_slice(&bytes).map_err(|error| damaged(shown(&error.to_string())))?;
    let shard = |name: &String| {
        let path = RepoPath::parse(name).filter(|path| path.as_str().ends_with(".safetensors"));
        path.ok_or_else(|| {
            damaged(format!("found the shard {:?}, expected the name of a safetensors file", shown(name)))
        })
    };
    parsed.weight_map.0.iter().map(shard).collect()
}

/// `model.safetensors.index.json`, of which only the names of files are kept.
#[derive(Deserialize)]
struct Index {
    weight_map: Values,
}

/// The different values of a map, whose keys may be millions of tensors.
struct Values(BTreeSet<String>);

impl<'de> Deserialize<'de> for Values {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Values, D::Error> {
        deserializer.deserialize_map(ValuesVisitor)
    }
}

struct ValuesVisitor;

impl<'de> Visitor<'de> for ValuesVisitor {
    type Value = Values;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map from tensors to files")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Values, A::Error> {
        let mut values = BTreeSet::new();
        while let Some((IgnoredAny, value)) = map.next_entry::<IgnoredAny, String>()? {
            values.insert(value);
            if values.len() > MAX_SHARDS {
                return Err(de::Error::custom(format_args!("found more than {MAX_SHARDS} files")));
            }
        }
        Ok(Values(values))
    }
}

/// Adds the names of the files below `folder`, through links. A folder that cannot be read has none.
fn list(folder: &Path, prefix: &str, depth: usize, files: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let name = format!("{prefix}{name}");
        // A link to a blob that was deleted is no file.
        let Ok(found) = fs::metadata(entry.path()) else { continue };
        if found.is_file() && files.len() < MAX_FILES {
            files.insert(name);
        } else if found.is_dir() && depth > 0 {
            list(&entry.path(), &format!("{name}/"), depth - 1, files);
        }
    }
}
