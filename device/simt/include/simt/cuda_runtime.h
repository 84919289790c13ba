// Replacement for CUDA's header of this name: everything that device code may use under nvcc without an include.
#pragma once

#include "host/atomic.h"
#include "host/intrinsics.h"
#include "host/language.h"
#include "host/warp.h"
