//! The order of assignments by expert.

use device::{Arg, Device, Launch};
use trial::numbers::Random;

use super::{KERNELS, buffer, bytes};

/// Orders random assignments and compares them with a stable sort.
pub fn orders(device: &dyn Device, assignments: usize, experts: usize) {
    let mut random = Random::new((assignments * 131 + experts) as u64);
    // Most assignments are of the first experts.
    let chosen: Vec<u32> =
        (0..assignments).map(|_| (random.unit().abs().powi(3) * experts as f32) as u32 % experts as u32).collect();
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<u8>>();
    let on_device = buffer(device, &words(&chosen));
    let [order, starts] = [assignments, experts + 1].map(|count| buffer(device, &vec![0xff; count * 4]));
    let args = [&on_device, &order, &starts].map(|buffer| Arg::pointer(buffer, 0));
    let args = args.into_iter().chain([Arg::from(assignments as u32), Arg::from(experts as u32)]).collect::<Vec<_>>();
    let (grid, block) = ([experts as u32, 1, 1], [256, 1, 1]);
    let launch = Launch { module: "models", kernel: "group_by_expert", grid, block, shared_bytes: 0, args: &args };
    device.launch(&launch).unwrap();
    let mut want: Vec<u32> = (0..assignments as u32).collect();
    want.sort_by_key(|a| chosen[*a as usize]);
    let what = format!("{assignments} assignments to {experts} experts on {}", device.name());
    assert!(bytes(device, &order) == words(&want), "{what}");
    let before = |expert| chosen.iter().filter(|chosen| **chosen < expert).count() as u32;
    assert!(bytes(device, &starts) == words(&(0..=experts as u32).map(before).collect::<Vec<_>>()), "{what}");
}

#[test]
fn assignments_are_in_the_order_of_their_experts_and_then_of_their_numbers() {
    for device in KERNELS.devices(7) {
        for (assignments, experts) in [(1, 1), (2, 40), (256, 3), (257, 5), (1000, 70), (3000, 2)] {
            orders(&*device, assignments, experts);
        }
    }
}
