//! The kernel that measures the bandwidth of a GPU.

use attention_kernels::read_memory;
use device::Device;
use trial::numbers::Random;
use trial::{buffer, bytes};

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

#[test]
fn the_bandwidth_kernel_reads_every_word() {
    for device in devices::gpus(5) {
        for (size, blocks) in [(16, 2), (24, 1), ((40 << 20) + 48, 2048)] {
            let [found, expected] = read_and_fold(&*device, size, blocks);
            assert_eq!(found, expected, "{size} bytes on {}", device.name());
        }
    }
}
