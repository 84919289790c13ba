//! Swaps to page-locked memory and back, and conversions of whole caches to 8 bits and back. What they write is exact, and
//! everything else stays unchanged, bit for bit.

use std::sync::{Arc, Mutex};

use attention_kernels::{
    CacheFormat, Dtype, KvCache, KvDtype, KvScales, KvShape, Layout, SwapSpace, Values, convert_fp8,
};
use device::{Device, Queue};
use trial::floats;
use trial::numbers::{Random, from_byte, from_bytes, round, to_byte, to_bytes};

use super::covering;
use super::devices::{self, buffer, bytes};
use crate::support::hooked::{Hooked, Hooks};

#[test]
fn blocks_that_are_swapped_out_and_in_are_the_same_and_alone_change() {
    for device in devices::all() {
        let device = &*device;
        let format = CacheFormat { dtype: Dtype::F16, ..CacheFormat::default() };
        // Two layers whose blocks differ in size, the second of them latent; 7 blocks here, 5 there.
        let mut random = Random::new(3);
        let layers = [(2, 24), (1, 64)].map(|(num_kv_heads, head_dim)| {
            let shape = KvShape { num_blocks: 7, num_kv_heads, block_size: 8, head_dim };
            filled(device, shape, format, |_| random.next() as u8)
        });
        let (mut caches, before): (Vec<KvCache>, Vec<[Vec<u8>; 2]>) = layers.into_iter().unzip();
        caches[1].values = Values::InKeys { dim: 48 };
        let mut space = SwapSpace::new(device, &caches, 5).unwrap();
        // Contiguous runs, blocks that are contiguous on one side only (targets here, sources on the way back), and a block
        // of the space that is written twice.
        let out = [(1, 0), (2, 1), (6, 2), (4, 3), (5, 4), (0, 4)];
        let copied = space.swap_out(device, &caches, &out).unwrap();
        device.wait(Queue::Compute, &copied).unwrap();
        for cache in &mut caches {
            for pages in cache.buffers_mut() {
                let noise = vec![0xa5; pages.len_bytes()];
                device.copy(&buffer(device, &noise), 0, pages, 0, noise.len()).unwrap();
            }
        }
        let back = [(4, 1), (0, 5), (1, 6), (2, 3), (3, 0)];
        let copied = space.swap_in(device, &mut caches, &back).unwrap();
        device.wait(Queue::Compute, &copied).unwrap();
        // For each block of the caches, the block whose contents it has now: 1 was 0, 5 and 6 were 1 and 2, 0 was 4, 3 was
        // 6.
        let held = [Some(4), Some(0), None, Some(6), None, Some(1), Some(2)];
        for (layer, (cache, before)) in caches.iter().zip(&before).enumerate() {
            for ((name, buffer), before) in ["keys", "values"].into_iter().zip(cache.buffers()).zip(before) {
                let (now, size) = (bytes(device, buffer), before.len() / 7);
                for (block, held) in held.into_iter().enumerate() {
                    let want = held.map_or(vec![0xa5; size], |held| before[held * size..][..size].to_vec());
                    let what = format!("{}: block {block} of the {name} of layer {layer}", device.name());
                    assert!(now[block * size..][..size] == want, "{what}");
                }
            }
        }
    }
}

/// Counts the calls that enqueue copies, and their ranges.
#[derive(Default)]
struct Calls(Mutex<Vec<usize>>);

impl Hooks for Calls {
    fn before_batch(&self, ranges: usize) {
        self.0.lock().unwrap().push(ranges);
    }
}

#[test]
fn a_swap_of_scattered_blocks_is_one_call_for_all_layers() {
    let device = Hooked { device: device::open("cpu", Some(1)).unwrap(), hooks: Calls::default() };
    let shape = KvShape { num_blocks: 9, num_kv_heads: 1, block_size: 8, head_dim: 8 };
    let layer = |_| filled(&device, shape, CacheFormat::default(), |at| at as u8).0;
    let mut caches: Vec<KvCache> = (0..3).map(layer).collect();
    let mut space = SwapSpace::new(&device, &caches, 6).unwrap();
    let calls = || std::mem::take(&mut *device.hooks.0.lock().unwrap());
    space.swap_out(&device, &caches, &[(8, 0), (6, 1), (4, 2), (2, 3), (3, 4)]).unwrap();
    assert_eq!(calls(), [3 * 2 * 4], "keys and values of 3 layers, in 4 runs");
    space.swap_in(&device, &mut caches, &[(0, 1), (1, 3), (2, 5)]).unwrap();
    assert_eq!(calls(), [3 * 2 * 3]);
    // The second copy to a block comes after the first.
    space.swap_out(&device, &caches, &[(0, 0), (1, 1), (2, 0)]).unwrap();
    assert_eq!(calls(), [3 * 2, 3 * 2]);
    space.swap_out(&device, &caches, &[]).unwrap();
    assert!(calls().is_empty());
}

#[test]
fn a_swap_of_blocks_that_do_not_exist_copies_nothing() {
    let device = device::open("cpu", Some(1)).unwrap();
    let shape = KvShape { num_blocks: 4, num_kv_heads: 1, block_size: 8, head_dim: 8 };
    let (cache, before) = filled(&*device, shape, CacheFormat::default(), |at| at as u8);
    let mut caches = vec![cache];
    let mut space = SwapSpace::new(&*device, &caches, 2).unwrap();
    assert_eq!(space.num_blocks(), 2);
    let mut said = |out: &[(u32, u32)], back: &[(u32, u32)], caches: &mut [KvCache]| {
        let out = space.swap_out(&*device, caches, out).err().map(|error| error.to_string());
        let back = space.swap_in(&*device, caches, back).err().map(|error| error.to_string());
        (out.unwrap_or_default(), back.unwrap_or_default())
    };
    let (out, back) = said(&[(0, 0), (4, 1)], &[(0, 1), (1, 4)], &mut caches);
    assert_eq!((out.as_str(), back.as_str()), ("block id: found 4, expected 4", "block id: found 4, expected 4"));
    let (out, back) = said(&[(0, 0), (1, 2)], &[(0, 1), (2, 2)], &mut caches);
    assert_eq!((out.as_str(), back.as_str()), ("block id: found 2, expected 2", "block id: found 2, expected 2"));
    assert!(bytes(&*device, &caches[0].keys) == before[0], "a swap that was refused wrote");
    let (none, _) = said(&[], &[], &mut []);
    assert_eq!(none, "layers of the swap space: found 1, expected 0");
    caches[0].values = Values::InKeys { dim: 8 };
    assert_eq!(said(&[], &[], &mut caches).0, "buffers of a swapped layer: found 1, expected 2");
    let mut other = [KvCache::new(&*device, KvShape { head_dim: 16, ..shape }).unwrap()];
    assert_eq!(said(&[], &[], &mut other).0, "bytes of a swapped block: found 512, expected 256");
}

/// Returns the settings of all conversions, in pairs (by threes with everything): format, shape, scales per head.
fn settings(strength: usize) -> Vec<(CacheFormat, KvShape, Option<bool>)> {
    let kv_dtypes = [KvDtype::Fp8E4m3, KvDtype::Fp8E5m2, KvDtype::Int8];
    let rows = covering::rows(&[3, 3, 2, 3, 2, 3, 3], strength, 5).into_iter();
    let setting = rows.map(|row| {
        let (dtype, kv_dtype, layout) = (Dtype::ALL[row[0]], kv_dtypes[row[1]], Layout::COMMON[row[2]]);
        let (head_dim, block_size, num_kv_heads) = ([8, 40, 128][row[3]], [5, 16][row[4]], [1, 2, 3][row[5]]);
        let shape = KvShape { num_blocks: 5, num_kv_heads, block_size, head_dim };
        (CacheFormat { dtype, kv_dtype, layout }, shape, [None, Some(false), Some(true)][row[6]])
    });
    setting.collect()
}

/// A full-width cache, the same in 8 bits, and the scales of its elements: those of a head in `shape`.
struct Pair {
    full: KvCache,
    small: KvCache,
    numbers: [Vec<f32>; 2],
    scales: [Vec<f32>; 2],
}

impl Pair {
    fn new(device: &dyn Device, format: CacheFormat, shape: KvShape, per_head: Option<bool>, seed: u64) -> Pair {
        let mut random = Random::new(seed);
        let elements = shape.num_blocks * shape.block_elements();
        let numbers = [0, 1].map(|_| {
            let mut numbers: Vec<f32> = (0..elements).map(|_| round(format.dtype, 6.0 * random.unit())).collect();
            // Values that are clamped or infinite in f16, NaN, negative zero, and values that 8 bits cannot represent.
            numbers[..4].copy_from_slice(&[1e9, f32::NAN, -0.0, 1e-7].map(|number| round(format.dtype, number)));
            numbers
        });
        let count = if per_head == Some(true) { shape.num_kv_heads } else { 1 };
        let scales = [0, 1].map(|_| match per_head {
            None => vec![1.0],
            Some(_) => (0..count).map(|_| 0.03 * (1.5 + random.unit())).collect::<Vec<f32>>(),
        });
        let cache = |format, contents: [Vec<u8>; 2]| {
            let [keys, values] = contents.map(|contents| buffer(device, &contents));
            KvCache { shape, format, keys, values: values.into(), scales: None }
        };
        let stored = numbers.each_ref().map(|numbers| to_bytes(format.dtype, numbers));
        let full = cache(CacheFormat { kv_dtype: KvDtype::Same, ..format }, stored);
        let mut small = cache(format, [0, 1].map(|_| (0..elements).map(|_| random.next() as u8).collect()));
        small.scales = per_head.map(|per_head| {
            Arc::new(KvScales {
                keys: floats(device, &scales[0]).unwrap(),
                values: floats(device, &scales[1]).unwrap(),
                per_head,
            })
        });
        Pair { full, small, numbers, scales }
    }

    /// Returns the scale of element `at` of the keys (0) or values (1).
    fn scale(&self, which: usize, at: usize) -> f32 {
        let KvShape { num_kv_heads, block_size, head_dim, .. } = self.full.shape;
        let head = match self.full.format.layout {
            Layout::Nhd => at / head_dim % num_kv_heads,
            _ => at / (block_size * head_dim) % num_kv_heads,
        };
        self.scales[which][head.min(self.scales[which].len() - 1)]
    }
}

#[test]
fn a_conversion_rounds_each_number_once_and_its_inverse_multiplies_each_byte_by_its_scale() {
    for device in devices::gpus(9) {
        let device = &*device;
        for (i, (format, shape, per_head)) in
            settings(if testkit::everything() { 3 } else { 2 }).into_iter().enumerate()
        {
            let what = format!("{format}, {shape:?}, scales per head {per_head:?} on {}", device.name());
            let mut pair = Pair::new(device, format, shape, per_head, i as u64);
            // Back to full width first: random bytes contain every code.
            let mut back = KvCache::with_format(device, shape, pair.full.format).unwrap();
            convert_fp8(device, &pair.small, &mut back).unwrap_or_else(|error| panic!("{what}: {error}"));
            for (which, (from, to)) in pair.small.buffers().zip(back.buffers()).enumerate() {
                let (codes, found) = (bytes(device, from), from_bytes(format.dtype, &bytes(device, to)));
                for (at, (code, found)) in codes.into_iter().zip(found).enumerate() {
                    let want = round(format.dtype, from_byte(format.kv_dtype, code) * pair.scale(which, at));
                    let same = found.to_bits() == want.to_bits() || (found.is_nan() && want.is_nan());
                    assert!(same, "{what}: byte {code:#x} at {at} of {which} became {found}, want {want}");
                }
            }
            convert_fp8(device, &pair.full, &mut pair.small).unwrap_or_else(|error| panic!("{what}: {error}"));
            for (which, cache) in pair.small.buffers().enumerate() {
                for (at, (found, number)) in bytes(device, cache).into_iter().zip(&pair.numbers[which]).enumerate() {
                    let want = to_byte(format.kv_dtype, number / pair.scale(which, at));
                    assert_eq!(found, want, "{what}: {number} at {at} of {which}");
                }
            }
        }
    }
}

#[test]
fn caches_that_do_not_match_are_not_converted() {
    for device in devices::gpus(0) {
        let shape = KvShape { num_blocks: 2, num_kv_heads: 2, block_size: 8, head_dim: 16 };
        let eight = CacheFormat { dtype: Dtype::F16, kv_dtype: KvDtype::Int8, layout: Layout::Hnd };
        let full = CacheFormat { kv_dtype: KvDtype::Same, ..eight };
        let said = |from: (CacheFormat, KvShape), to: (CacheFormat, KvShape)| {
            let [from, mut to] =
                [from, to].map(|(format, shape)| KvCache::with_format(&*device, shape, format).unwrap());
            convert_fp8(&*device, &from, &mut to).err().map(|error| error.to_string()).unwrap_or_default()
        };
        assert_eq!(said((full, shape), (eight, shape)), "");
        let none = KvShape { num_blocks: 0, ..shape };
        assert_eq!(said((full, none), (eight, none)), "", "a launch of nothing");
        for (from, to) in [(full, full), (eight, eight), (CacheFormat { layout: Layout::Nhd, ..full }, eight)] {
            let error = said((from, shape), (to, shape));
            assert!(error.starts_with("convert_fp8 was called with f16, cache "), "{error}");
        }
        assert!(said((CacheFormat { dtype: Dtype::Bf16, ..full }, shape), (eight, shape)).contains("bf16, cache same"));
        let error = said((full, shape), (eight, KvShape { num_blocks: 3, ..shape }));
        assert_eq!(error, "blocks of the converted cache: found 3, expected 2");
        let odd = KvShape { head_dim: 12, ..shape };
        assert_eq!(said((full, odd), (eight, odd)), "head size modulo 8: found 4, expected 0");
    }
}

/// Launches every conversion on small caches, for the sanitizers.
pub fn convert_all(device: &dyn Device) {
    for (format, shape, per_head) in settings(2) {
        let mut pair = Pair::new(device, format, shape, per_head, 1);
        convert_fp8(device, &pair.full, &mut pair.small).unwrap();
        convert_fp8(device, &pair.small, &mut pair.full).unwrap();
    }
}

fn filled(
    device: &dyn Device,
    shape: KvShape,
    format: CacheFormat,
    mut fill: impl FnMut(usize) -> u8,
) -> (KvCache, [Vec<u8>; 2]) {
    let len = shape.num_blocks * shape.block_elements() * format.element_bytes();
    let contents: [Vec<u8>; 2] = [0, 1].map(|_| (0..len).map(&mut fill).collect());
    let [keys, values] = contents.each_ref().map(|contents| buffer(device, contents));
    (KvCache { shape, format, keys, values: values.into(), scales: None }, contents)
}
