//! The values of every element type.

use models::decoder::{Linear, Part, Role};
use models::gguf::{ElementType, TYPES};
use models::{Weights, load_matrix};

use super::made::{Made, u32_value};
use super::made_vocabulary::{files, sized};
use crate::common::message;

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

/// Values of rows of NVFP4 by their definition: a float of 4 bits, times one without a sign of 8 bits for each 16 weights, times a factor.
/// A block of 64 has its four scales first, then for each 16 the codes of which the low halves of bytes are the first eight.
fn nvfp4(data: &[u8], factor: f64) -> Vec<f64> {
    const FLOATS: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let of_block = |block: &[u8]| -> Vec<f64> {
        let value = |i: usize| {
            let (group, within) = (i / 16, i % 16);
            let byte = block[4 + group * 8 + within % 8];
            let code = usize::from(if within < 8 { byte & 15 } else { byte >> 4 });
            let (exponent, mantissa) = (i32::from(block[group] >> 3), f64::from(block[group] & 7));
            let scale = match exponent {
                0 => mantissa / 8.0 * 2f64.powi(-6),
                _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
            };
            let sign = if code & 8 == 0 { 1.0 } else { -1.0 };
            sign * FLOATS[code & 7] * scale * factor
        };
        (0..64).map(value).collect()
    };
    data.chunks_exact(36).flat_map(of_block).collect()
}

#[test]
fn the_second_scale_of_nvfp4_multiplies_the_weights_of_its_matrix() {
    let kind = TYPES.iter().find(|kind| kind.name == "NVFP4").unwrap();
    // Scales are positive numbers: no sign, and not the last code.
    let data = |seed: u8, rows: usize| -> Vec<u8> {
        let random = bytes(kind).into_iter().cycle().skip(seed.into()).take(rows * 36);
        random.enumerate().map(|(i, byte)| if i % 36 < 4 { byte % 0x7f } else { byte }).collect()
    };
    let experts = [("expert_count", 3), ("expert_used_count", 1), ("expert_feed_forward_length", 64)];
    let base = experts
        .iter()
        .fold(sized("qwen3moe"), |made, (key, value)| made.key(&format!("qwen3moe.{key}"), u32_value(*value)));
    let file = base
        .tensor("blk.0.attn_output.weight", &[64, 5], kind.id, &data(1, 5))
        .floats("blk.0.attn_output.scale", &[1], &[0.037])
        .floats("blk.0.attn_output.input_scale", &[1], &[900.0])
        .tensor("blk.0.attn_q.weight", &[64, 4], kind.id, &data(2, 4))
        .tensor("blk.0.ffn_down_exps.weight", &[64, 4, 3], kind.id, &data(3, 12))
        .floats("blk.0.ffn_down_exps.scale", &[3], &[0.5, 3.3, 1.0 / 2688.0])
        .tensor("blk.0.ffn_up_exps.weight", &[64, 4, 3], kind.id, &data(4, 12))
        .floats("blk.0.ffn_up_exps.scale", &[1], &[7.7]);
    let expert = |name: &str, number: usize| format!("model.layers.0.mlp.experts.{number}.{name}");
    let third = |seed: u8, number: usize| data(seed, 12)[number * 144..][..144].to_vec();
    let weights = Weights::open(&files(&file).unwrap()).unwrap();
    let host = device::open("cpu", Some(1)).unwrap();
    let check = |name: &str, data: Vec<u8>, factor: f32| {
        let want = nvfp4(&data, factor.into());
        let rows = want.len() / 64;
        let close = |found: &[f32], what: &str| {
            let near = |(found, want): (&f32, &f64)| (f64::from(*found) - want).abs() <= 2f64.powi(-22) * want.abs();
            assert!(found.iter().zip(&want).all(near), "{name}, {what}: {found:?}, not {want:?}");
        };
        close(&weights.expect(&format!("{name}.weight"), &[rows, 64]).unwrap().to_f32(), "as numbers");
        let linear = Linear::new(64, Role::Column, [Part::new(name, rows)]);
        let matrix = load_matrix(&linear, &weights, &*host, device::Dtype::F32).unwrap();
        let mut found = vec![f32::NAN; want.len()];
        found.chunks_mut(64).enumerate().for_each(|(row, out)| matrix.host().unwrap().copy_row(row, out));
        close(&found, "for products");
    };
    check("model.layers.0.self_attn.o_proj", data(1, 5), 0.037);
    check("model.layers.0.self_attn.q_proj", data(2, 4), 1.0);
    for (number, factor) in [0.5, 3.3, 1.0 / 2688.0].into_iter().enumerate() {
        check(&expert("down_proj", number), third(3, number), factor);
        check(&expert("up_proj", number), third(4, number), 7.7);
    }
    assert!(weights.names().all(|name| !name.contains("scale")), "{:?}", weights.names().collect::<Vec<_>>());
    let two = |made: Made| files(&made.floats("blk.0.attn_q.scale", &[2], &[1.0, 2.0]));
    message(two(file), &["attn_q.scale of 2 values", "expected 1 or 1"]);
}
