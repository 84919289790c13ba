//! Measured limits of the machine.

use simd::Pool;
use simd::roofline::{bf16_peak, f32_peak, int8_peak, read_bandwidth, tile_peak};

#[test]
fn the_measured_limits_are_plausible() {
    let pool = Pool::new(Some(1)).unwrap();
    let (read, int8, f32) = (read_bandwidth(&pool, 8 << 20), int8_peak(&pool), f32_peak(&pool));
    // Bytes or operations per second. Other figures mean that a loop was optimised away, or not optimised.
    assert!((1e7..1e12).contains(&read), "{read:e}");
    assert!((1e7..2e13).contains(&int8), "{int8:e}");
    assert!((1e7..1e12).contains(&f32), "{f32:e}");
    // Emulated, it is slower.
    let bf16 = bf16_peak(&pool);
    assert!((1e6..2e12).contains(&bf16), "{bf16:e}");
    assert!(tile_peak(&pool).is_none_or(|tiles| (1e11..1e13).contains(&tiles)));
}
