//! Predicted times, for counts whose times are easy to compute.

use device::sim::{Bound, Card, Counts, assumption};

const GIB: u64 = 1 << 30;

fn card(name: &str) -> Card {
    Card::find(name).unwrap()
}

/// Counts of blocks that spread evenly over the multiprocessors of every card.
fn even(counts: Counts) -> Counts {
    Counts { busy_blocks: 132 * 108 * 71 * 128, ..counts }
}

/// Checks what bounds the launches on a card and how many microseconds they take in a graph, to a tenth of a percent.
#[track_caller]
fn assert_time(name: &str, launches: u64, counts: &Counts, bound: Bound, microseconds: f64) {
    let prediction = card(name).predict(launches, counts);
    let found = prediction.seconds() * 1e6;
    assert_eq!(prediction.bound(), bound, "{prediction:?}");
    assert!((found / microseconds - 1.0).abs() < 1e-3, "found {found}, expected {microseconds}");
}

#[test]
fn sectors_that_are_read_once_take_the_time_of_memory() {
    let sectors = 4 * GIB / 32;
    let counts = Counts { busy_blocks: 13200, sectors, distinct_sectors: sectors, ..Counts::default() };
    // 4.295 GB at 0.9 × 4.8 TB/s, and at 0.9 × 1.008 TB/s.
    assert_time("H200", 1, &counts, Bound::Memory, 994.2 + 1.0);
    assert_time("RTX 4090", 1, &counts, Bound::Memory, 4734.3 + 1.0);
}

#[test]
fn sectors_that_are_read_again_take_the_time_of_the_cache_where_it_holds_them() {
    let counts = |distinct_sectors| {
        let sectors = 64 * distinct_sectors;
        Counts { busy_blocks: 13200, sectors, distinct_sectors, ..Counts::default() }
    };
    // 2.147 GB at 0.6 × 5120 bytes × 1.83 GHz.
    assert_time("H100", 1, &counts((32 << 20) / 32), Bound::L2, 382.0 + 1.0);
    // Of 200 MiB the cache holds a quarter: 209.7 MB and three quarters of 63 times as much from memory.
    assert_time("H100", 1, &counts((200 << 20) / 32), Bound::Memory, 209.715 * (1.0 + 0.75 * 63.0) / 0.9 / 3.35 + 1.0);
    // Two launches of a half each: the cache holds what one launch reads.
    assert_time("H100", 2, &counts((64 << 20) / 32), Bound::L2, 2.0 * 382.0 + 2.0);
}

#[test]
fn few_blocks_read_no_faster_than_their_multiprocessors() {
    let counts = |busy_blocks| Counts { busy_blocks, sectors: 1 << 20, distinct_sectors: 1 << 20, ..Counts::default() };
    // 33.55 MB at 64 bytes × 1.83 GHz.
    assert_time("H200", 1, &counts(1), Bound::Load, 286.5 + 1.0);
    // Two blocks of 133 are on one multiprocessor.
    assert_time("H200", 1, &counts(133), Bound::Memory, 7.767 + 1.0);
    let part = card("H200").predict(1, &counts(133)).parts.into_iter().find(|part| part.0 == Bound::Load).unwrap();
    assert!((part.1 * 1e6 / (2.0 * 286.5 / 133.0) - 1.0).abs() < 1e-3, "{part:?}");
}

#[test]
fn bank_conflicts_take_the_time_of_their_passes() {
    let passes = 132 * 1_830_000;
    let counts =
        |busy_blocks| Counts { busy_blocks, shared_passes: passes, bank_conflicts: passes / 2, ..Counts::default() };
    assert_time("H100", 1, &counts(132), Bound::Shared, 1000.0 + 1.0);
    assert_time("H100", 1, &counts(66), Bound::Shared, 2000.0 + 1.0);
    assert_time("H100", 1, &counts(198), Bound::Shared, 1333.3 + 1.0);
}

#[test]
fn products_take_the_time_of_their_instruction() {
    let multiply_adds = 312_000_000_000 / 2048 * 2048;
    let of_warps =
        Counts { busy_blocks: 108 * 132, products: multiply_adds / 2048, multiply_adds, ..Counts::default() };
    assert_time("A100", 1, &of_warps, Bound::Tensor, 2000.0 + 1.0);
    assert_time("H100", 1, &of_warps, Bound::Tensor, 624e9 / (assumption::HOPPER_MMA_SHARE * 989.4e6) + 1.0);
    let of_warpgroups = Counts { products: 0, warpgroup_products: multiply_adds >> 17, ..of_warps };
    assert_time("H100", 1, &of_warpgroups, Bound::Tensor, 624e3 / 989.4 + 1.0);
}

#[test]
fn exponentials_take_the_time_of_their_units_and_none_beside_longer_products() {
    // A millisecond of all units.
    let counts = |busy_blocks| Counts { busy_blocks, exponentials: 16 * 132 * 1_830_000, ..Counts::default() };
    assert_time("H200", 1, &counts(132), Bound::Exponential, 1000.0 + 1.0);
    assert_time("H200", 1, &counts(133), Bound::Exponential, 2.0 * 132.0 / 133.0 * 1000.0 + 1.0);
    let multiply_adds = 989_400_000_000 >> 17 << 17;
    let products = Counts { warpgroup_products: multiply_adds >> 17, multiply_adds, ..counts(132) };
    assert_time("H200", 1, &products, Bound::Tensor, 2000.0 + 1.0);
}

#[test]
fn blocks_without_work_take_the_time_to_start_them_and_empty_launches_their_cost() {
    let counts = Counts { blocks: 524_288, busy_blocks: 16_384, ..Counts::default() };
    assert_time("H200", 1, &counts, Bound::Blocks, 524_288.0 / 1830.0 + 1.0);
    let small = Counts { blocks: 1, busy_blocks: 1, sectors: 1, distinct_sectors: 1, ..Counts::default() };
    assert_time("L40S", 3, &small, Bound::Launch, 3.0);
    let prediction = card("L40S").predict(3, &small);
    assert!((prediction.eager_seconds() - prediction.seconds() - 6e-6).abs() < 1e-12);
}

#[test]
fn cards_order_as_their_memory_and_as_their_products() {
    let order = |counts: &Counts| {
        let mut cards = Card::ALL;
        cards.sort_by(|a, b| a.predict(1, counts).seconds().total_cmp(&b.predict(1, counts).seconds()));
        cards.map(|card| card.name)
    };
    let memory = even(Counts { sectors: 1 << 32, distinct_sectors: 1 << 32, ..Counts::default() });
    assert_eq!(order(&memory), ["H200", "H100", "A100", "RTX 4090", "L40S"]);
    let tensor = even(Counts { products: 1 << 30, multiply_adds: 1 << 41, ..Counts::default() });
    assert_eq!(order(&tensor), ["H200", "H100", "L40S", "A100", "RTX 4090"]);
}

#[test]
fn counts_scale_with_the_work() {
    let counts = Counts { blocks: 2, sectors: 3, multiply_adds: 5, ..Counts::default() };
    assert_eq!(counts.scaled(4), Counts { blocks: 8, sectors: 12, multiply_adds: 20, ..Counts::default() });
}
