// entry.h: calls a kernel as the runtime does, with an array of pointers to its parameters.
#pragma once
#include "mma.h"

namespace host {

// The array of parameters is not memory of the kernel, so reads of it are not instrumented.
#define HOST_UNCHECKED __attribute__((no_sanitize("thread")))

template <typename T> struct unqualified { using type = T; };
template <typename T> struct unqualified<const T> { using type = T; };
template <int... INDEX> struct indices {};
template <int N, int... INDEX> struct count_to : count_to<N - 1, N - 1, INDEX...> {};
template <int... INDEX> struct count_to<0, INDEX...> { using type = indices<INDEX...>; };

template <typename... T, int... INDEX>
HOST_UNCHECKED inline void call(void (*kernel)(T...), void** parameters, indices<INDEX...>) {
    kernel(*static_cast<typename unqualified<T>::type*>(parameters[INDEX])...);
}
template <typename... T>
HOST_UNCHECKED inline void call(void (*kernel)(T...), void** parameters) {
    call(kernel, parameters, typename count_to<sizeof...(T)>::type());
}

}  // namespace host
