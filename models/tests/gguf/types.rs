//! The values of every element type.

use models::gguf::{ElementType, TYPES};

/// Hashes of the values of 64 blocks of [`bytes`], as `dequantize` of gguf-py 0.19.0 computes them.
const HASHES: [(&str, u64); 26] = [
    ("F32", 0x4300520511e6a230),
    ("F16", 0xc3704734ad1ca825),
    ("Q4_0", 0xafe431205ecb1725),
    ("Q4_1", 0x4213e3ba5ef149b3),
    ("Q5_0", 0xd24e9c3fc07cd725),
    ("Q5_1", 0xf78b905355e92ea0),
    ("Q8_0", 0xefe91bdf0eb3eaa5),
    ("Q2_K", 0x717acc42dce22b22),
    ("Q3_K", 0xcf57ffca56635765),
    ("Q4_K", 0xdcf44ef97c965f7a),
    ("Q5_K", 0xe608cc43ba285559),
    ("Q6_K", 0x833f7fddb9f47fc7),
    ("IQ2_XXS", 0x406ba1e63c1af679),
    ("IQ2_XS", 0xb190530b5f2e74f9),
    ("IQ3_XXS", 0x8afa43b6e7c0967d),
    ("IQ1_S", 0x03a50694e15557e5),
    ("IQ4_NL", 0x188e9efc9ef92265),
    ("IQ3_S", 0x0105a2c00ce7a4c5),
    ("IQ2_S", 0x0c4b38b3d0186265),
    ("IQ4_XS", 0xb5985cb8dbd9e539),
    ("IQ1_M", 0xb9c069d1e6fb86c5),
    ("BF16", 0x21ba43d354310825),
    ("TQ1_0", 0x6fd191dda89d2325),
    ("TQ2_0", 0x96b8a256ac07a325),
    ("MXFP4", 0x3c8d4592e36ec325),
    ("NVFP4", 0x7f8abc2fbeff6325),
];

/// The upper bytes of a linear congruential sequence that begins with the type's number.
fn bytes(kind: &ElementType) -> Vec<u8> {
    let mut state = u64::from(kind.id);
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 56) as u8
    };
    (0..64 * kind.bytes).map(|_| next()).collect()
}

#[test]
fn values_have_the_bits_of_the_reference() {
    for (kind, (name, want)) in TYPES.iter().zip(HASHES) {
        let values = kind.values(&bytes(kind));
        assert_eq!((kind.name, values.len()), (name, 64 * kind.block));
        // Which NaN a product with one gives is not part of a definition.
        let bits = values.iter().map(|value| if value.is_nan() { 0x7fc0_0000 } else { value.to_bits() });
        let hash =
            bits.fold(0xcbf2_9ce4_8422_2325_u64, |hash, bits| (hash ^ u64::from(bits)).wrapping_mul(0x0100_0000_01b3));
        assert_eq!(hash, want, "{name}");
    }
}

#[test]
fn every_value_of_a_scale_of_mxfp4_is_a_power_of_two() {
    let kind = ElementType::of_id(39).unwrap();
    for exponent in 0..=255_u8 {
        let mut block = [0x22; 17];
        block[0] = exponent;
        // Code 2 is 1.0; the format's scale is 2^(e - 127).
        let want = 2.0_f64.powi(i32::from(exponent) - 127) as f32;
        assert_eq!(kind.values(&block), [want; 32], "{exponent}");
    }
}
