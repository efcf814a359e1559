//! The C function `hypotf`, which resvg's geometry calls, for hosts older than the one that builds this program. glibc 2.35
//! gave `hypotf` a new symbol version (`objdump -T` shows it), so a program that was linked against that one does not start
//! with the glibc 2.34 of RHEL 9. A definition of our own keeps the linker from asking for it. tests/packages fails
//! without it: the rpm package may require no symbol newer than 2.34.
#![allow(unsafe_code, reason = "a function by its C name and C ABI")]

/// The length of a vector: the square root of `x`² + `y`², infinite where one of them is (C11, F.10.4.3).
// SAFETY: name, arguments and result are math.h's, so that whoever is linked to it gets what it expects.
#[unsafe(no_mangle)]
pub extern "C" fn hypotf(x: f32, y: f32) -> f32 {
    if x.is_infinite() || y.is_infinite() {
        return f32::INFINITY;
    }
    let (x, y) = (f64::from(x), f64::from(y));
    // The square of a float fits into a double, so nothing overflows before the root is taken.
    #[expect(clippy::cast_possible_truncation, reason = "the result is a float")]
    let length = (x * x + y * y).sqrt() as f32;
    length
}

#[cfg(test)]
mod tests {
    use super::hypotf;

    #[test]
    fn lengths_of_vectors() {
        for (x, y, length) in
            [(3.0, -4.0, 5.0), (3e38, 0.0, 3e38), (f32::NEG_INFINITY, f32::NAN, f32::INFINITY)]
        {
            assert_eq!(hypotf(x, y).to_bits(), f32::to_bits(length), "{x}, {y}");
        }
        assert!(hypotf(1.0, f32::NAN).is_nan());
    }
}
