//! Functions of a C library that is opened at run time, and why one cannot be opened.

/// Declares a structure with the functions of a library, each of which returns a code, and how to look them up. `load` returns the
/// name of the first that the library lacks. A library may have a type of handles.
macro_rules! functions {
    ($(#[$meta:meta])* $type:ident<$($handle:ident: $bound:path)?>
     $($name:ident = $symbol:literal($($argument:ty),*);)*) => {
        $(#[$meta])*
        #[derive(Clone, Copy)]
        pub(super) struct $type<$($handle)?> {
            $(pub $name: unsafe extern "C" fn($($argument),*) -> ::std::ffi::c_int,)*
        }

        impl<$($handle: $bound)?> $type<$($handle)?> {
            pub fn load(library: &::libloading::Library) -> Result<Self, &'static str> {
                $(
                    // SAFETY: the header of the library declares the function with this type.
                    let $name = unsafe {
                        library.get::<unsafe extern "C" fn($($argument),*) -> ::std::ffi::c_int>($symbol)
                    };
                    let $name = *$name.map_err(|_| $symbol)?;
                )*
                Ok(Self { $($name),* })
            }
        }
    };
}

pub(super) use functions;

/// Returns what the loader says, in one line.
pub(super) fn reason(error: &libloading::Error) -> String {
    let text = std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string);
    text.replace('\n', " ")
}
