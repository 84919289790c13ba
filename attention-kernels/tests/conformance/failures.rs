//! Looks that fail: each prints a line `look failed: {…}` of JSON with all of its settings, and the others run all the same. The test
//! fails at its end with their number.

use std::panic::{AssertUnwindSafe, catch_unwind};

use attention_kernels::{CacheFormat, Dtype, KernelError, KvShape, Variant};
use device::Device;
use serde_json::{Map, Value, json};
use trial::numbers::from_bytes;
use trial::{Look, Wrong};

/// What is wrong with a look, as keys and values of its line.
#[derive(Debug)]
pub struct Fault(Value);

impl From<Wrong> for Fault {
    fn from(Wrong { part, place, got, want, error, wrong, of }: Wrong) -> Fault {
        Fault(json!({ "fault": part, "first": place, "got": number(f64::from(got)), "want": number(want),
            "error": number(error), "wrong": wrong, "of": of }))
    }
}

impl From<KernelError> for Fault {
    fn from(error: KernelError) -> Fault {
        Fault(json!({ "fault": error.to_string() }))
    }
}

/// JSON has no NaN and no infinity.
fn number(value: f64) -> Value {
    if value.is_finite() { value.into() } else { value.to_string().into() }
}

/// Compares elements bit for bit.
pub fn same_bits(what: &str, dtype: Dtype, got: &[u8], want: &[u8]) -> Result<(), Fault> {
    let number = |bytes: &[u8]| number(f64::from(from_bytes(dtype, bytes)[0]));
    same(what, dtype.bytes(), got, want, |bytes| json!([number(bytes), format!("{bytes:02x?}")]))
}

/// Compares bytes.
pub fn same_bytes(what: &str, got: &[u8], want: &[u8]) -> Result<(), Fault> {
    same(what, 1, got, want, |bytes| json!(format!("{bytes:02x?}")))
}

fn same(what: &str, size: usize, got: &[u8], want: &[u8], show: impl Fn(&[u8]) -> Value) -> Result<(), Fault> {
    assert_eq!(got.len(), want.len(), "{what}");
    let mut wrong = got.chunks(size).zip(want.chunks(size)).enumerate().filter(|(_, (got, want))| got != want);
    let Some((first, (one, other))) = wrong.next() else { return Ok(()) };
    let counts = (1 + wrong.count(), got.len() / size);
    Err(Fault(json!({ "fault": what, "first": first, "got": show(one), "want": show(other), "wrong": counts.0,
        "of": counts.1 })))
}

/// The settings of a look.
pub fn of_look(seed: u64, look: &Look) -> Value {
    let Look { format, heads, dim, latent, block_size, scales, window, sparse, soft_cap, alibi, sinks, lens, .. } =
        look;
    let mut settings = of_format(format);
    let sparse = sparse.map(|sparse| format!("{sparse:?}"));
    settings.extend(object(json!({ "seed": seed, "heads": heads, "head_dim": dim, "latent": latent,
        "block_size": block_size, "scales_per_head": scales, "window": window, "sparse": sparse, "soft_cap": soft_cap,
        "alibi": alibi, "sinks": sinks, "lens": lens })));
    settings.into()
}

/// The settings of a write or a copy.
pub fn of_cache(
    seed: u64,
    format: &CacheFormat,
    shape: &KvShape,
    scales: Option<bool>,
    latent: Option<usize>,
) -> Value {
    let KvShape { num_blocks, num_kv_heads, block_size, head_dim } = shape;
    let mut settings = of_format(format);
    settings.extend(object(json!({ "seed": seed, "num_blocks": num_blocks, "num_kv_heads": num_kv_heads,
        "block_size": block_size, "head_dim": head_dim, "scales_per_head": scales, "latent": latent })));
    settings.into()
}

fn of_format(CacheFormat { dtype, kv_dtype, layout }: &CacheFormat) -> Map<String, Value> {
    object(json!({ "dtype": dtype.to_string(), "kv_dtype": kv_dtype.to_string(), "layout": layout.to_string() }))
}

fn object(value: Value) -> Map<String, Value> {
    if let Value::Object(object) = value { object } else { Map::new() }
}

/// Counts the looks of a test, and fails it when it is dropped if some of them failed.
#[derive(Default)]
pub struct Looks {
    looked: usize,
    failed: usize,
}

impl Looks {
    /// Runs one look of a variant with these settings. A panic is a fault of the look. Ends the test if the device has failed too,
    /// since all others would.
    pub fn look<T>(
        &mut self,
        device: &dyn Device,
        variant: &Variant,
        settings: &Value,
        look: impl FnOnce() -> Result<T, Fault>,
    ) -> Option<T> {
        self.looked += 1;
        let outcome = catch_unwind(AssertUnwindSafe(look)).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string()));
            Err(Fault(json!({ "fault": text })))
        });
        let Fault(fault) = match outcome {
            Ok(found) => return Some(found),
            Err(fault) => fault,
        };
        self.failed += 1;
        let mut line =
            object(json!({ "variant": variant.name, "operation": variant.operation.key(), "device": device.name() }));
        line.extend(object(settings.clone()));
        line.extend(object(fault));
        println!("look failed: {}", Value::Object(line));
        assert!(device.synchronize().is_ok(), "the device has failed: {:?}", device.synchronize());
        None
    }
}

impl Drop for Looks {
    fn drop(&mut self) {
        let Looks { looked, failed } = self;
        assert!(*failed == 0 || std::thread::panicking(), "{failed} of {looked} looks failed");
    }
}

#[test]
#[should_panic(expected = "1 of 3 looks failed")]
fn a_look_that_fails_is_counted_and_the_others_run() {
    let device = device::open("cpu", Some(1)).unwrap();
    let variant = super::devices::variants_on(&*device, &[attention_kernels::Operation::Decode])[0];
    let mut looks = Looks::default();
    let mut compare = |got: &[u8]| {
        looks.look(&*device, variant, &json!({}), || same_bits("bits", Dtype::F16, got, &[0, 0, 1, 0, 2, 0]))
    };
    assert_eq!(compare(&[0, 0, 1, 0, 2, 0]), Some(()));
    assert_eq!(compare(&[0, 0, 3, 0, 3, 0]), None);
    assert_eq!(compare(&[0, 0, 1, 0, 2, 0]), Some(()));
}
