//! The kernels that measure a GPU: bandwidth and tensor cores.

use attention_kernels::Dtype;
use attention_kernels::trial::numbers::{Random, from_bytes};
use attention_kernels::trial::{TILE_THREADS, buffer, bytes, multiply_tiles, read_memory};
use device::Device;

use super::devices;

/// Returns the xor of all words of `size` random bytes, as computed by `blocks` thread blocks of the kernel and by the CPU.
pub fn read_and_fold(device: &dyn Device, size: usize, blocks: usize) -> [u32; 2] {
    let mut random = Random::new(size as u64);
    let noise: Vec<u8> = (0..size / 8).flat_map(|_| random.next().to_ne_bytes()).collect();
    let fold = |bytes: &[u8]| bytes.as_chunks::<4>().0.iter().fold(0, |sum, word| sum ^ u32::from_ne_bytes(*word));
    let mut sums = buffer(device, &vec![0x55; blocks * size_of::<u32>()]).unwrap();
    read_memory(device, &buffer(device, &noise).unwrap(), &mut sums).unwrap();
    [fold(&bytes(device, &sums).unwrap()), fold(&noise[..size / 16 * 16])]
}

/// Returns the sums of the threads of one block that adds `steps` times eight products of tiles, all elements x and y, and
/// the expected sum, which is exact below 2^24.
pub fn multiply_and_sum(device: &dyn Device, [x, y]: [f32; 2], steps: u32) -> (Vec<f32>, f32) {
    let mut sums = buffer(device, &vec![0x55; TILE_THREADS * size_of::<f32>()]).unwrap();
    let pair = |value: f32| (value.to_bits() >> 16) * 0x1_0001;
    multiply_tiles(device, [pair(x), pair(y)], steps, &mut sums).unwrap();
    (from_bytes(Dtype::F32, &bytes(device, &sums).unwrap()), 512.0 * steps as f32 * x * y)
}

#[test]
fn the_bandwidth_kernel_reads_every_word() {
    for device in devices::gpus(5) {
        for (size, blocks) in [(16, 2), (24, 1), ((40 << 20) + 48, 2048)] {
            let [found, expected] = read_and_fold(&*device, size, blocks);
            assert_eq!(found, expected, "{size} bytes on {}", device.name());
        }
    }
}

#[test]
fn the_tensor_core_kernel_multiplies_as_often_as_stated() {
    for device in devices::gpus(5) {
        for (factors, steps) in [([1.0, 1.0], 1), ([2.0, -0.5], 7), ([3.0, 0.25], 4)] {
            let (found, expected) = multiply_and_sum(&*device, factors, steps);
            assert!(found.iter().all(|sum| *sum == expected), "{factors:?}, {steps} steps: {expected}, {found:?}");
        }
    }
}
