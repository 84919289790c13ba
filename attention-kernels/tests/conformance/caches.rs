//! Cache writes and block copies: what they write is exact, and everything else stays as it was, bit for bit.

use attention_kernels::{
    AttentionBatch, BlockCopyArgs, CacheFormat, CacheWriteArgs, Dtype, KvCache, KvDtype, KvScales, KvShape, Latents,
    Layout, Operation, Values, Variant, Workspace, variants,
};
use device::{Device, DeviceError, Launch};
use std::sync::{Arc, Mutex};
use trial::numbers::{Random, element, from_bytes, int8_row, round, to_byte, to_bytes};
use trial::{Look, OnDevice, Problem, floats};

use super::covering;
use super::devices::{self, buffer, bytes, variants_on};
use super::failures::{Fault, Looks, of_cache, same_bytes};
use super::looks;
use crate::support::hooked::{Hooked, Hooks};

/// Returns a workspace for writes of up to `rows` rows.
pub fn write_workspace(device: &dyn Device, shape: &KvShape, rows: usize) -> Workspace {
    trial::write_workspace(device, shape, rows, 64).unwrap()
}

/// Loads these slots into a workspace.
pub fn loaded(mut workspace: Workspace, device: &dyn Device, slots: &[i64]) -> Workspace {
    let batch = AttentionBatch { query_starts: vec![0], ..AttentionBatch::default() };
    workspace.load(device, &batch, slots, None).unwrap();
    workspace
}

/// Settings of a write or copy: format, shape, scales per head, elements of latent values.
type Setting = (CacheFormat, KvShape, Option<bool>, Option<usize>);

/// Returns the settings of all writes or copies of a variant.
fn settings(variant: &Variant) -> Vec<Setting> {
    let can = &variant.capabilities;
    let pick = |sizes: attention_kernels::Sizes, of: &[usize]| -> Vec<usize> {
        of.iter().copied().filter(|&size| sizes.contain(size)).collect()
    };
    let dims = pick(can.head_sizes, &[8, 20, 64, 80, 256, 576]);
    let block_sizes = pick(can.block_sizes, &[8, 16, 5, 128]);
    let heads = [1, 2, 8];
    let sizes =
        [can.dtypes.len(), can.kv_dtypes.len(), can.layouts.len(), dims.len(), block_sizes.len(), heads.len(), 3];
    let strength = if testkit::everything() { 3 } else { 2 };
    let rows = covering::rows(&sizes, strength, 11).into_iter();
    let setting = rows.map(|row| {
        let format =
            CacheFormat { dtype: can.dtypes[row[0]], kv_dtype: can.kv_dtypes[row[1]], layout: can.layouts[row[2]] };
        let (format, block_size, head_dim) = looks::that_exists(format, block_sizes[row[4]], dims[row[3]]);
        let shape = KvShape { num_blocks: 7, num_kv_heads: heads[row[5]], block_size, head_dim };
        let scales = [None, Some(false), Some(true)][row[6]].filter(|_| format.kv_dtype.takes_scales());
        (format, shape, scales, None)
    });
    let separate: Vec<Setting> = setting.collect();
    let can_be_latent = |(format, ..): &&Setting| can.latent == Latents::Any && !format.kv_dtype.takes_scales();
    let latent = separate.iter().filter(can_be_latent).map(|(format, shape, scales, _)| {
        let format = CacheFormat { layout: looks::without_pairs(format.layout), ..*format };
        (format, *shape, *scales, Some(8))
    });
    latent.collect::<Vec<_>>().into_iter().chain(separate.clone()).collect()
}

/// Returns a cache of random bytes, and these bytes: those of the keys and of separate values.
fn random_cache(
    device: &dyn Device,
    shape: KvShape,
    format: CacheFormat,
    latent: Option<usize>,
    random: &mut Random,
) -> (KvCache, [Vec<u8>; 2]) {
    let len = shape.num_blocks * format.block_bytes(&shape);
    let contents: [Vec<u8>; 2] = std::array::from_fn(|_| (0..len).map(|_| random.next() as u8).collect());
    let [keys, values] = contents.each_ref().map(|contents| buffer(device, contents));
    let values = latent.map_or(Values::Separate(values), |dim| Values::InKeys { dim });
    (KvCache { shape, format, keys, values, scales: None }, contents)
}

#[test]
fn cache_writes_touch_their_slots_alone_and_skip_minus_one() {
    let mut failures = Looks::default();
    for device in devices::all() {
        for variant in variants_on(&*device, &[Operation::CacheWrite]) {
            for (setting, i) in settings(variant).into_iter().zip(0..) {
                let (format, shape, scales, latent) = &setting;
                let of_setting = of_cache(i, format, shape, *scales, *latent);
                failures.look(&*device, variant, &of_setting, || writes(&*device, variant, setting, i));
            }
        }
    }
}

fn writes(
    device: &dyn Device,
    variant: &Variant,
    (format, shape, scales, latent): Setting,
    seed: u64,
) -> Result<(), Fault> {
    let mut random = Random::new(seed);
    let (dim, width) = (shape.head_dim, shape.num_kv_heads * shape.head_dim);
    // A fused buffer with unused elements before, between and after keys and values.
    let (key_offset, value_offset, stride) = (16, 16 + width + 8, 2 * width + 40);
    // Scattered slots, or adjacent ones of which sixteen in the middle are whole vectors of pairs.
    let mut slots: Vec<i64> = (0..(shape.num_blocks * shape.block_size) as i64).collect();
    if seed.is_multiple_of(2) {
        random.shuffle(&mut slots);
        slots.truncate(9);
    } else {
        slots = slots[3..34].to_vec();
    }
    slots[3] = -1;
    let rows = slots.len();
    let mut source: Vec<f32> = (0..rows * stride).map(|_| round(format.dtype, 6.0 * random.unit())).collect();
    source[key_offset] = 1e9; // clamped, or infinite in f16
    let with_nan = matches!(format.kv_dtype, KvDtype::Fp8E4m3 | KvDtype::Int8PerToken);
    source[value_offset + stride] = if with_nan { f32::NAN } else { -0.0 };
    source[key_offset + 2 * stride..][..dim].fill(0.0); // a head without a greatest number
    let (mut cache, mut want) = random_cache(device, shape, format, latent, &mut random);
    let count = if scales == Some(true) { shape.num_kv_heads } else { 1 };
    let scale: [Vec<f32>; 2] = std::array::from_fn(|_| (0..count).map(|_| 0.03 * (1.5 + random.unit())).collect());
    cache.scales = scales.map(|per_head| {
        let [keys, values] = [&scale[0], &scale[1]].map(|scale| floats(device, scale).unwrap());
        Arc::new(KvScales { keys, values, per_head })
    });
    for (row, &slot) in slots.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
        let (block, token) = (slot as usize / shape.block_size, slot as usize % shape.block_size);
        for head in 0..shape.num_kv_heads {
            for (which, offset) in [key_offset, value_offset].into_iter().enumerate() {
                let from = offset + row * stride + head * dim;
                if format.kv_dtype == KvDtype::Int8PerToken {
                    let rounded = to_bytes(format.dtype, &source[from..from + dim]);
                    let (bytes, scale) = int8_row(&from_bytes(format.dtype, &rounded));
                    let unit = (block * shape.num_kv_heads + head) * shape.block_size * (dim + 4);
                    want[which][unit + token * dim..][..dim].copy_from_slice(&bytes);
                    want[which][unit + shape.block_size * dim + token * 4..][..4].copy_from_slice(&scale.to_le_bytes());
                    continue;
                }
                let stored = match (element(format), format.kv_dtype) {
                    (Some(dtype), _) => to_bytes(dtype, &source[from..from + dim]),
                    (None, other) => {
                        let scale = if scales.is_some() { scale[which][head.min(count - 1)] } else { 1.0 };
                        let rounded = to_bytes(format.dtype, &source[from..from + dim]);
                        let values = from_bytes(format.dtype, &rounded);
                        values.iter().map(|value| to_byte(other, value / scale)).collect()
                    }
                };
                for (column, stored) in stored.chunks(format.element_bytes()).enumerate() {
                    let at = format.layout.index(&shape, which, slot as usize, head, column) * stored.len();
                    want[which][at..at + stored.len()].copy_from_slice(stored);
                }
            }
        }
    }
    let workspace = loaded(write_workspace(device, &shape, rows), device, &slots);
    let args = CacheWriteArgs {
        source: &buffer(device, &to_bytes(format.dtype, &source)),
        key_offset,
        value_offset: if latent.is_some() { usize::MAX } else { value_offset },
        stride,
        slot_mapping: &slots,
        cache: &mut cache,
        workspace: Some(&workspace),
    };
    variant.cache_write(device, args)?;
    for ((name, cache), want) in ["keys", "values"].into_iter().zip(cache.buffers()).zip(&want) {
        let mut got = bytes(device, cache);
        if format.kv_dtype == KvDtype::Int8PerToken {
            // The scale of a row with a NaN is a NaN, whose other bits are the device's: a GPU writes 0x7fffffff.
            let nan = f32::NAN.to_le_bytes();
            for (got, want) in got.as_chunks_mut::<4>().0.iter_mut().zip(want.as_chunks::<4>().0) {
                if *want == nan && f32::from_le_bytes(*got).is_nan() {
                    *got = nan;
                }
            }
        }
        same_bytes(name, &got, want)?;
    }
    Ok(())
}

#[test]
fn block_copies_run_in_order_with_repeated_sources() {
    devices::all().iter().for_each(|device| copy_all(&**device));
}

/// Calls every variant that copies blocks with every setting.
pub fn copy_all(device: &dyn Device) {
    let copies = [(0, 3), (0, 4), (3, 1), (5, 6), (4, 3), (2, 2)];
    let mut failures = Looks::default();
    for variant in variants_on(device, &[Operation::BlockCopy]) {
        for ((format, mut shape, _, latent), i) in settings(variant).into_iter().zip(0..) {
            if device.name() != "cpu" && format.block_bytes(&shape) % 16 != 0 {
                shape.block_size *= 2; // vectors of 16 bytes: 5 tokens of 8 bytes are no whole ones
            }
            let (mut cache, mut want) = random_cache(device, shape, format, latent, &mut Random::new(i));
            let bytes_of = format.block_bytes(&shape);
            for (from, to) in copies {
                want.iter_mut()
                    .for_each(|want| want.copy_within(from * bytes_of..(from + 1) * bytes_of, to * bytes_of));
            }
            let pairs = copies.map(|(from, to)| (from as u32, to as u32));
            let mut workspace = write_workspace(device, &shape, 1);
            workspace.load_copies(device, &pairs).unwrap();
            failures.look(device, variant, &of_cache(i, &format, &shape, None, latent), || {
                let args = BlockCopyArgs { copies: &pairs, cache: &mut cache, workspace: Some(&workspace) };
                variant.block_copy(device, args)?;
                let mut pages = ["keys", "values"].into_iter().zip(cache.buffers()).zip(&want);
                pages.try_for_each(|((name, pages), want)| same_bytes(name, &bytes(device, pages), want))
            });
        }
    }
}

/// Remembers the number of copies of each launch.
struct Copies(Arc<Mutex<Vec<u32>>>);

impl Hooks for Copies {
    fn launch(&self, device: &dyn Device, launch: &Launch<'_>) -> Result<(), DeviceError> {
        self.0.lock().unwrap().push(launch.grid[0]);
        device.launch(launch)
    }
}

#[test]
fn copies_that_depend_on_each_other_are_in_different_launches() {
    let Some(device) = devices::one(0) else { return };
    let launched = Arc::new(Mutex::default());
    let device = Hooked { device, hooks: Copies(Arc::clone(&launched)) };
    let shape = KvShape { num_blocks: 7, num_kv_heads: 1, block_size: 4, head_dim: 8 };
    let mut cache = KvCache::new(&device, shape).unwrap();
    let mut workspace = write_workspace(&device, &shape, 1);
    let copy = variants(Operation::BlockCopy).into_iter().find(|v| v.capabilities.runs_on(device.name())).unwrap();
    for (copies, expected, what) in [
        (&[][..], &[][..], "nothing"),
        (&[(0, 3), (0, 4), (1, 2)], &[3], "independent copies"),
        (&[(0, 3), (3, 1), (5, 6)], &[1, 2], "a source that was written"),
        (&[(0, 3), (4, 0)], &[1, 1], "a target that was read"),
        (&[(0, 3), (4, 3)], &[1, 1], "a target that was written"),
        (&[(1, 2), (3, 3)], &[1, 1], "a block copied onto itself"),
    ] {
        workspace.load_copies(&device, copies).unwrap();
        copy.block_copy(&device, BlockCopyArgs { copies, cache: &mut cache, workspace: Some(&workspace) }).unwrap();
        assert_eq!(std::mem::take(&mut *launched.lock().unwrap()), expected, "{what}");
    }
}

#[test]
fn slots_and_blocks_that_do_not_exist_are_refused_before_anything_runs() {
    let shape = KvShape { num_blocks: 6, num_kv_heads: 2, block_size: 8, head_dim: 16 };
    for device in devices::all() {
        let mut workspace = write_workspace(&*device, &shape, 2);
        let batch = AttentionBatch { query_starts: vec![0], ..AttentionBatch::default() };
        for slot in [48, -2] {
            let error = workspace.load(&*device, &batch, &[0, slot], None).unwrap_err().to_string();
            assert!(error.starts_with("slot: found") && error.ends_with("expected 48"), "{error}");
        }
        let error = workspace.load_copies(&*device, &[(0, 6)]).unwrap_err().to_string();
        assert_eq!(error, "block id: found 6, expected 6");
        for variant in variants_on(&*device, &[Operation::CacheWrite, Operation::BlockCopy]) {
            let format = CacheFormat { dtype: Dtype::F32, kv_dtype: KvDtype::Same, layout: Layout::Hnd };
            let (mut cache, before) = random_cache(&*device, shape, format, None, &mut Random::new(1));
            let source = buffer(&*device, &[0; 4 * 64]);
            let error = match variant.operation {
                Operation::CacheWrite => {
                    let (slot_mapping, cache) = (&[48][..], &mut cache);
                    let workspace = Some(&workspace);
                    let args = CacheWriteArgs {
                        source: &source,
                        key_offset: 0,
                        value_offset: 32,
                        stride: 64,
                        slot_mapping,
                        cache,
                        workspace,
                    };
                    variant.cache_write(&*device, args).unwrap_err()
                }
                _ => {
                    let args = BlockCopyArgs { copies: &[(0, 6)], cache: &mut cache, workspace: Some(&workspace) };
                    variant.block_copy(&*device, args).unwrap_err()
                }
            };
            let error = error.to_string();
            let said = ["slot: found 48", "no such slots on the device", "block id: found 6"];
            assert!(said.iter().any(|said| error.contains(said)), "{}: {error}", variant.name);
            assert!(bytes(&*device, &cache.keys) == before[0], "{}", variant.name);
        }
    }
}

#[test]
fn a_poisoned_page_yields_nan_in_every_type_that_has_nan() {
    for device in devices::all() {
        for variant in variants_on(&*device, &[Operation::Decode]) {
            let can = &variant.capabilities;
            // int8 without scales in the page has no NaN.
            let is_latent = matches!(can.latent, Latents::Only(_));
            let has_nan = |kv_dtype: &KvDtype| *kv_dtype != KvDtype::Int8 && !(is_latent && kv_dtype.takes_scales());
            let with_nan = can.kv_dtypes.iter().copied().filter(has_nan);
            let latent = (can.latent == Latents::Any).then_some((KvDtype::Same, Some(48)));
            for (kv_dtype, latent) in with_nan.map(|kv_dtype| (kv_dtype, None)).chain(latent) {
                let format = CacheFormat { dtype: can.dtypes[0], kv_dtype, layout: Layout::Hnd };
                let look = Look { latent, ..Look::plain(format, vec![(1, 40), (1, 40)]) };
                let mut look = looks::fitting(can, look);
                let suits = |layout: &&Layout| layout.suits(kv_dtype, look.block_size, look.dim, look.latent.is_some());
                look.format.layout = can.layouts.iter().find(suits).copied().unwrap_or_default();
                let problem = Problem::new(3, &look);
                let what = format!("{} on {}: {kv_dtype}", variant.name, device.name());
                let mut on_device = problem.on(&device).unwrap();
                let nan = |on_device: &OnDevice<'_>| -> Vec<bool> {
                    let results = on_device.run(variant, 0..2, false).unwrap();
                    let row = |row| from_bytes(look.format.dtype, results.rows(&problem, row..row + 1).0);
                    (0..2).map(|seq| row(seq).iter().all(|x| x.is_nan())).collect()
                };
                // The last eight tokens are slots 0 to 8 of the third block of each.
                let third = |seq: usize| problem.batch.table(seq)[2] as usize;
                on_device.cache.poison(&*device, third(0), 8).unwrap();
                assert_eq!(nan(&on_device), [false, false], "{what}: slots that nobody reads");
                on_device.cache.poison(&*device, third(0), 7).unwrap();
                assert_eq!(nan(&on_device), [true, false], "{what}");
            }
        }
    }
}

#[test]
fn the_registry_says_which_cache_types_a_device_serves() {
    let cpu = device::open("cpu", Some(1)).unwrap();
    assert!(KvDtype::ALL.into_iter().all(|kv_dtype| attention_kernels::serves_cache(&*cpu, kv_dtype)));
    let Some(gpu) = devices::one(0) else { return };
    let served = KvDtype::ALL.into_iter().filter(|kv_dtype| attention_kernels::serves_cache(&*gpu, *kv_dtype));
    assert_eq!(served.collect::<Vec<_>>(), KvDtype::ON_GPU);
}
