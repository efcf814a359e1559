//! Writing answers through the pointers that a C caller gave.
#![allow(unsafe_code, reason = "C ABI")]

use std::ffi::{c_char, c_uint};

use nvml_wrapper_sys::bindings::{
    nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE as INSUFFICIENT_SIZE,
    nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT as INVALID_ARGUMENT, nvmlReturn_enum_NVML_SUCCESS as SUCCESS,
    nvmlReturn_t,
};

/// A value, or the NVML error code instead.
pub type Answer<T = ()> = Result<T, nvmlReturn_t>;

/// What the C function returns.
pub fn code(answer: Answer) -> nvmlReturn_t {
    answer.err().unwrap_or(SUCCESS)
}

/// Writes a value.
///
/// # Safety
/// `out` is null or valid for a write.
pub unsafe fn put<T>(out: *mut T, value: T) -> Answer {
    if out.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: not null, so valid for a write as the caller promised.
    unsafe { out.write(value) };
    Ok(())
}

/// `NVML_STRUCT_VERSION` of nvml.h: what a struct of type `T` and this number must begin with.
#[expect(clippy::cast_possible_truncation, reason = "structs of NVML are small")]
pub const fn struct_version<T>(number: c_uint) -> c_uint {
    size_of::<T>() as c_uint | number << 24
}

/// The version at the beginning of a struct that states its own version.
///
/// # Safety
/// `version` is null or valid for a read.
pub unsafe fn version_of(version: *const c_uint) -> Answer<c_uint> {
    // SAFETY: as the caller promised.
    unsafe { version.as_ref() }.copied().ok_or(INVALID_ARGUMENT)
}

/// Writes a string and its NUL.
///
/// # Safety
/// `buffer` is null or valid for writes of `length` bytes.
pub unsafe fn put_text(buffer: *mut c_char, length: c_uint, text: &str) -> Answer {
    if buffer.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    if text.len() >= length as usize {
        return Err(INSUFFICIENT_SIZE);
    }
    // SAFETY: the text and one NUL fit the `length` bytes that the caller promised.
    unsafe {
        buffer.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), text.len());
        buffer.add(text.len()).write(0);
    }
    Ok(())
}

/// Writes an array. `count` is its size on input and the list's length on output, as for the process lists. If the
/// array is too small, the result is `INSUFFICIENT_SIZE`.
///
/// # Safety
/// `count` is null or valid; `array` is null or valid for writes of `*count` elements.
pub unsafe fn put_list<T: Copy>(array: *mut T, count: *mut c_uint, list: &[T]) -> Answer {
    if count.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    let number = c_uint::try_from(list.len()).unwrap_or(c_uint::MAX);
    // SAFETY: not null, so valid as the caller promised.
    let room = unsafe { count.replace(number) };
    if room < number {
        return Err(INSUFFICIENT_SIZE);
    }
    if list.is_empty() {
        return Ok(());
    }
    if array.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: the caller promised room for `room` elements, which is no less than the list has.
    unsafe { array.copy_from_nonoverlapping(list.as_ptr(), list.len()) };
    Ok(())
}

/// Writes an array that the caller has made large enough, and its length. In MIG's lists `count` is only an output.
///
/// # Safety
/// `count` is null or valid; `array` is null or valid for writes of as many elements as the list has.
pub unsafe fn put_all<T: Copy>(array: *mut T, count: *mut c_uint, list: &[T]) -> Answer {
    if array.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: `count` is null or valid as the caller promised.
    unsafe { put(count, c_uint::try_from(list.len()).unwrap_or(c_uint::MAX))? };
    // SAFETY: not null, so with room for the list as the caller promised.
    unsafe { array.copy_from_nonoverlapping(list.as_ptr(), list.len()) };
    Ok(())
}

/// Fills a C array with a string, which may be truncated.
pub fn chars<const N: usize>(text: &str) -> [c_char; N] {
    let mut out = [0; N];
    for (to, from) in out.iter_mut().take(N - 1).zip(text.bytes()) {
        *to = c_char::from_ne_bytes([from]);
    }
    out
}
