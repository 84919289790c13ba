//! What the reader accepts and what it refuses.

use std::path::Path;
use std::sync::Arc;

use models::gguf::Gguf;

use super::made::{Made, array_value, small, string, u16_value, u32_value};
use crate::common::message;

fn open(bytes: Vec<u8>) -> Result<Gguf, models::LoadError> {
    Gguf::from_bytes("m.gguf", Arc::from(bytes))
}

/// Checks that the file is refused in one line that says these parts.
fn refused(bytes: Vec<u8>, parts: &[&str]) {
    message(open(bytes), &[&["m.gguf: found"], parts].concat());
}

#[test]
fn both_versions_are_read_whole() {
    for version in [2, 3] {
        let gguf = open(Made { version, ..small() }.bytes()).unwrap();
        assert_eq!(gguf.value("general.architecture").unwrap().text(), Some("llama"));
        assert_eq!(gguf.value("llama.block_count").unwrap().unsigned(), Some(7));
        assert_eq!(gguf.value("llama.rope.freq_base").unwrap().float(), Some(1e4));
        assert_eq!(gguf.value("signed").unwrap().float(), Some(-3.0));
        assert_eq!(gguf.value("signed").unwrap().unsigned(), None);
        assert_eq!(gguf.value("truth").unwrap().to_string(), "true");
        let tokens = gguf.value("tokens").unwrap().array().unwrap();
        assert_eq!(tokens.iter().map(|token| token.text().unwrap()).collect::<Vec<_>>(), ["a", "", "ccc"]);
        let nested = gguf.value("nested").unwrap().array().unwrap();
        let sums = nested.iter().map(|inner| inner.array().unwrap().iter().map(|x| x.unsigned().unwrap()).sum::<u64>());
        assert_eq!(sums.collect::<Vec<_>>(), [3, 3]);
        let one = &gguf.tensors()["one"];
        assert_eq!((one.kind.name, &one.shape[..]), ("F32", &[2, 3][..]));
        assert_eq!(one.kind.values(gguf.data(one)), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!(gguf.tensors()["two"].shape, [2, 32]);
        assert!(gguf.value("absent").is_none());
    }
}

#[test]
fn every_truncation_is_refused() {
    let bytes = small().bytes();
    for end in 0..bytes.len() {
        refused(bytes[..end].to_vec(), &["expected"]);
    }
    open(bytes).unwrap();
}

#[test]
fn other_formats_and_versions_are_refused() {
    refused(b"PK\x03\x04 a zip file".to_vec(), &["\"GGUF\""]);
    refused(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00".to_vec(),
        &["a pointer of Git LFS", "git lfs pull"],
    );
    refused(Made { version: 1, ..small() }.bytes(), &["version 1", "version 2 or 3"]);
    refused(Made { version: 3_u32.swap_bytes(), ..small() }.bytes(), &["big-endian"]);
}

#[test]
fn absurd_counts_are_refused_before_memory_is_taken() {
    let header = |tensors: u64, keys: u64| {
        let counts = [tensors.to_le_bytes(), keys.to_le_bytes()].concat();
        [&b"GGUF"[..], &3_u32.to_le_bytes(), &counts, &[0; 64]].concat()
    };
    refused(header(u64::MAX, 0), &["18446744073709551615 tensors", "at most 2,"]);
    refused(header(0, u64::MAX / 2), &["keys", "at most 4,"]);
    let key = |value: Vec<u8>| Made::new().key("k", value).bytes();
    for (kind, count) in [(8, u64::MAX), (0, u64::MAX), (12, 1 << 61), (9, 1 << 40), (8, 100)] {
        refused(key(array_value(kind, count, &[])), &["\"k\"", &format!("{count} elements"), "the rest of the file"]);
    }
    let long = [&8_u32.to_le_bytes()[..], &u64::MAX.to_le_bytes()].concat();
    refused(key(long), &["\"k\" of 18446744073709551615 bytes"]);
    refused(Made::new().key("n", [13, 0, 0, 0].to_vec()).bytes(), &["type 13", "types 0 to 12"]);
    refused(Made::new().key(&"n".repeat(70_000), u32_value(1)).bytes(), &["of 70000 bytes", "at most 65536"]);
}

#[test]
fn arrays_in_arrays_end_somewhere() {
    let nest = |depth: usize| {
        let mut value = array_value(0, 1, &[5])[4..].to_vec();
        for _ in 0..depth {
            value = array_value(9, 1, &value)[4..].to_vec();
        }
        Made::new().key("k", [&9_u32.to_le_bytes()[..], &value].concat()).bytes()
    };
    open(nest(3)).unwrap();
    refused(nest(4), &["\"k\"", "4 levels"]);
    refused(nest(1000), &["\"k\"", "4 levels"]);
}

#[test]
fn names_are_unique_and_plain() {
    let twice = small().key("truth", u32_value(1)).bytes();
    refused(twice, &["key \"truth\" twice"]);
    let twice = small().floats("one", &[1], &[1.0]).bytes();
    refused(twice, &["tensor \"one\" twice"]);
    let mut bytes = Made::new().key("abcd", u32_value(1)).bytes();
    let at = bytes.windows(4).position(|part| part == b"abcd").unwrap();
    bytes[at] = 0xff;
    refused(bytes, &["not UTF-8"]);
    refused(Made::new().floats(&"t".repeat(300), &[1], &[1.0]).bytes(), &["of 300 bytes", "at most 256"]);
    // A name from a stranger's file does not break the line.
    refused(Made::new().floats("two\nlines", &[1], &[]).bytes(), &["two\\nlines"]);
}

#[test]
fn tensors_lie_apart_inside_of_the_file() {
    let with = |change: &dyn Fn(&mut Made)| {
        let mut made = small();
        change(&mut made);
        made.bytes()
    };
    refused(with(&|made| made.tensors[1].offset = 0), &["inside of"]);
    refused(with(&|made| made.tensors[1].offset = 8), &["\"two\" at byte 8", "multiple of 32"]);
    refused(with(&|made| made.tensors[1].offset = 64), &["\"two\"", "its end"]);
    refused(with(&|made| made.tensors[1].offset = u64::MAX - 31), &["\"two\"", "its end"]);
    refused(with(&|made| made.tensors[1].dims = vec![32, 3]), &["\"two\"", "its end"]);
    refused(with(&|made| made.tensors[1].dims = vec![16, 4]), &["\"two\" with rows of 16", "multiple of 32", "Q8_0"]);
    refused(with(&|made| made.tensors[1].dims = vec![]), &["0 dimensions"]);
    refused(with(&|made| made.tensors[1].dims = vec![32; 5]), &["5 dimensions", "1 to 4"]);
    refused(with(&|made| made.tensors[1].dims = vec![32, 0]), &["[32, 0]"]);
    refused(with(&|made| made.tensors[1].dims = vec![1 << 32, 1 << 32]), &["product is in 64 bits"]);
    refused(with(&|made| made.tensors[0].dims = vec![1 << 62]), &["product is in 64 bits"]);
    refused(with(&|made| made.tensors[0].dims = vec![1 << 61]), &["its end"]);
    refused(with(&|made| made.tensors[1].id = 4), &["\"two\" of type 4", "Q4_K", "MXFP4"]);
    for alignment in [0, 3, 1 << 21] {
        refused(with(&|made| made.keys[1].1 = u32_value(alignment)), &["general.alignment", "power of two"]);
    }
    refused(with(&|made| made.keys[1].1 = [&8_u32.to_le_bytes()[..], &string("x")].concat()), &["general.alignment"]);
    let mut aligned = Made { alignment: 64, ..Made::new() }.key("general.alignment", u32_value(64));
    aligned = aligned.floats("a", &[1], &[1.5]).floats("b", &[1], &[2.5]);
    let gguf = open(aligned.bytes()).unwrap();
    assert_eq!(
        ["a", "b"].map(|name| gguf.tensors()[name].kind.values(gguf.data(&gguf.tensors()[name]))[0]),
        [1.5, 2.5]
    );
}

/// Three files of a split checkpoint, of `total` tensors according to the first.
fn write_split(folder: &Path, total: u16) {
    for part in 0..3 {
        let mut made = Made::new().key("split.no", u16_value(part)).key("split.count", u16_value(3));
        if part == 0 {
            made = made.key("general.architecture", super::made::text_value("llama"));
            made = made.key("split.tensors.count", u16_value(total));
        }
        made = made.floats(&format!("t{part}"), &[1], &[f32::from(part)]);
        std::fs::write(folder.join(format!("m-{:05}-of-00003.gguf", part + 1)), made.bytes()).unwrap();
    }
}

#[test]
fn any_part_of_a_split_checkpoint_opens_all() {
    let folder = tempfile::TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name);
    write_split(folder.path(), 3);
    for name in ["m-00001-of-00003.gguf", "m-00003-of-00003.gguf"] {
        let gguf = Gguf::open(&path(name)).unwrap();
        assert_eq!(gguf.value("general.architecture").unwrap().text(), Some("llama"));
        for (part, tensor) in gguf.tensors().values().enumerate() {
            assert_eq!((tensor.part, tensor.kind.values(gguf.data(tensor))), (part, vec![part as f32]));
        }
        assert_eq!(gguf.tensors().len(), 3);
    }
    std::fs::copy(path("m-00002-of-00003.gguf"), path("alone.gguf")).unwrap();
    message(Gguf::open(&path("alone.gguf")), &["alone.gguf: found split.count 3; expected 1"]);
    write_split(folder.path(), 4);
    message(Gguf::open(&path("m-00001-of-00003.gguf")), &["split.tensors.count 4", "3, the tensors"]);
    write_split(folder.path(), 3);
    std::fs::copy(path("m-00001-of-00003.gguf"), path("m-00002-of-00003.gguf")).unwrap();
    message(Gguf::open(&path("m-00001-of-00003.gguf")), &["m-00002-of-00003.gguf: found split.no 0; expected 1"]);
    std::fs::remove_file(path("m-00002-of-00003.gguf")).unwrap();
    message(Gguf::open(&path("m-00001-of-00003.gguf")), &["m-00002-of-00003.gguf: not found", "part 2"]);
}
