// The host's stand-in for CUDA's header of this name: all that nvcc lets device code use without an include.
#pragma once

#include "host/atomic.h"
#include "host/intrinsics.h"
#include "host/language.h"
#include "host/warp.h"
