"""The operations of `augment` as kernels: a program makes BLOCK pixels of one view, with what was drawn for it.

    cropped    crops, resizes, mirrors, and goes on with the colours up to contrast, which has to know a mean
    coloured   contrast and what follows it, greyscale, and solarization where nothing is blurred
    blurred    a Gaussian along one axis; after the second, solarization

Numbers of a view are a row of `fused_views.packed`. Operations that a view has nothing of are skipped, and nothing is
added up across programs but in their order: a view does not depend on which others are made beside it.
"""

import triton
import triton.language as tl

from dipole.vision.augment import LUMA

# The places of a row.
TOP, LEFT, HEIGHT, WIDTH, FLIP = (tl.constexpr(place) for place in range(5))
BRIGHTNESS, CONTRAST, SATURATION, HUE, GREY = (tl.constexpr(place) for place in range(5, 10))
SIGMA, RADIUS, THRESHOLD, ORDER = (tl.constexpr(place) for place in range(10, 14))
NUMBERS = tl.constexpr(17)  # of a row: the last four are the order of the jitter

RED, GREEN, BLUE = (tl.constexpr(weight) for weight in LUMA)


@triton.jit
def clamped(x):
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def luma_of(r, g, b, CHANNELS: tl.constexpr):
    if CHANNELS == 3:
        r = RED * r + GREEN * g + BLUE * b
    return r


@triton.jit
def blended(x, factor, other):
    return clamped(factor * x + (1 - factor) * other)


@triton.jit
def level(hue, offset):
    """How far a channel lies between the least and the largest, whose own hue is at -offset."""
    return clamped(tl.abs(tl.abs(hue + offset) - 3) - 1)


@triton.jit
def turned(r, g, b, turns):
    """`augment.adjust_hue_`."""
    low = tl.minimum(tl.minimum(r, g), b)
    chroma = tl.maximum(tl.maximum(r, g), b) - low
    hue = (g + b - r - low) / tl.maximum(chroma, 1e-12) + 1
    hue = tl.where(g < b, -hue, hue) + turns * 6
    hue -= tl.floor(hue / 6 + 0.5) * 6
    return low + chroma * level(hue, 0), low + chroma * level(hue, -2), low + chroma * level(hue, 2)


@triton.jit
def jittered(r, g, b, row, which, mean, CHANNELS: tl.constexpr):
    """One of the four operations of the jitter, by its number."""
    if which == 0:
        factor = tl.load(row + BRIGHTNESS)
        r, g, b = clamped(r * factor), clamped(g * factor), clamped(b * factor)
    elif which == 1:
        factor = tl.load(row + CONTRAST)
        r, g, b = blended(r, factor, mean), blended(g, factor, mean), blended(b, factor, mean)
    elif CHANNELS == 3:
        if which == 2:
            factor, grey = tl.load(row + SATURATION), luma_of(r, g, b, CHANNELS)
            r, g, b = blended(r, factor, grey), blended(g, factor, grey), blended(b, factor, grey)
        else:
            turns = tl.load(row + HUE)
            if turns != 0:
                r, g, b = turned(r, g, b, turns)
    return r, g, b


@triton.jit
def solarized(x, row):
    """Values from a threshold on inverted; what is not solarized has one that no value reaches."""
    return tl.where(x >= tl.load(row + THRESHOLD), 1 - x, x)


@triton.jit
def centre_of(place, start, scale):
    """Where the centre of a pixel of the view lies in the image."""
    return start - 0.5 + (place + 0.5) * scale


@triton.jit
def first_of(centre, scale):
    """The first pixel that may weigh; the triangle has no width below one pixel."""
    return tl.floor(centre - tl.maximum(scale, 1)).to(tl.int32) + (scale <= 1).to(tl.int32)


@triton.jit
def taps_of(scale):
    """How many pixels may weigh: one more than the triangle is wide, as its ends are rounded."""
    return tl.where(scale <= 1, 2, tl.ceil(2 * scale).to(tl.int32) + 2)


@triton.jit
def weight_of(pixel, centre, start, extent, scale, source):
    """What a pixel of the image weighs in one of the view, as in `augment.resampling`."""
    weight = tl.maximum(1 - tl.abs(pixel - centre) / tl.maximum(scale, 1), 0)
    weight *= clamped(pixel - start + 1) * clamped(start + extent - pixel)
    return tl.where((pixel >= 0) & (pixel < source), weight, 0.0)


@triton.jit(do_not_specialize=["count"])
def cropped(
    images, out, means, rows, count, planes, height, width, size, blocks,
    s_view, s_plane, s_y, s_x,
    CHANNELS: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Views (V, C, size, size) of images (count, C, height, width), and sums of their luma (V * planes, blocks)."""
    program, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    view, plane = program // planes, program % planes
    row = rows + view * NUMBERS
    place = block * BLOCK + tl.arange(0, BLOCK)
    inside = place < size * size
    place = tl.minimum(place, size * size - 1)  # behind the end the last pixel is made again, and not stored
    y, x = place // size, place % size
    top, left, tall, wide = tl.load(row + TOP), tl.load(row + LEFT), tl.load(row + HEIGHT), tl.load(row + WIDTH)
    mirrored = x + tl.load(row + FLIP) * (size - 1 - 2 * x)
    down, across = tall / size, wide / size
    y_centre, x_centre = centre_of(y.to(tl.float32), top, down), centre_of(mirrored, left, across)
    y_first, x_first = first_of(y_centre, down), first_of(x_centre, across)
    area = height * width
    first = images + ((view % count) * (planes * CHANNELS) + plane) * area
    r = tl.zeros((BLOCK,), tl.float32)
    g, b, x_total, y_total = r, r, r, r
    for tap in range(0, taps_of(across)):
        x_total += weight_of(x_first + tap, x_centre, left, wide, across, width)
    for i in range(0, taps_of(down)):
        y_pixel = y_first + i
        y_weight = weight_of(y_pixel, y_centre, top, tall, down, height)
        y_total += y_weight
        for j in range(0, taps_of(across)):
            x_pixel = x_first + j
            weight = y_weight * weight_of(x_pixel, x_centre, left, wide, across, width)
            used = inside & (weight > 0)
            pixel = y_pixel * width + x_pixel
            r += weight * tl.load(first + pixel, mask=used, other=0).to(tl.float32)
            if CHANNELS == 3:
                g += weight * tl.load(first + area + pixel, mask=used, other=0).to(tl.float32)
                b += weight * tl.load(first + 2 * area + pixel, mask=used, other=0).to(tl.float32)
    total = x_total * y_total
    if BYTES:
        total *= 255
    r, g, b = tl.div_rn(r, total), tl.div_rn(g, total), tl.div_rn(b, total)
    going = 1
    for number in range(0, 4):
        which = tl.load(row + ORDER + number).to(tl.int32)
        if which == 1:
            going = 0
        if going == 1:
            r, g, b = jittered(r, g, b, row, which, 0.0, CHANNELS)
    tl.store(means + program * blocks + block, tl.sum(tl.where(inside, luma_of(r, g, b, CHANNELS), 0.0)))
    target = out + view * s_view + plane * s_plane + y * s_y + x * s_x
    tl.store(target, r, mask=inside)
    if CHANNELS == 3:
        tl.store(target + s_plane, g, mask=inside)
        tl.store(target + 2 * s_plane, b, mask=inside)


@triton.jit
def coloured(
    out, means, rows, planes, size, blocks,
    s_view, s_plane, s_y, s_x,
    CHANNELS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same views from contrast on, in place."""
    program, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    view, plane = program // planes, program % planes
    row = rows + view * NUMBERS
    place = block * BLOCK + tl.arange(0, BLOCK)
    inside = place < size * size
    every = tl.arange(0, BLOCKS)
    mean = tl.sum(tl.load(means + program * blocks + every, mask=every < blocks, other=0.0)) / (size * size)
    target = out + view * s_view + plane * s_plane + place // size * s_y + place % size * s_x
    r = tl.load(target, mask=inside, other=0.0)
    g, b = r, r
    if CHANNELS == 3:
        g = tl.load(target + s_plane, mask=inside, other=0.0)
        b = tl.load(target + 2 * s_plane, mask=inside, other=0.0)
    going = 0
    for number in range(0, 4):
        which = tl.load(row + ORDER + number).to(tl.int32)
        if which == 1:
            going = 1
        if going == 1:
            r, g, b = jittered(r, g, b, row, which, mean, CHANNELS)
    share = tl.load(row + GREY)
    if CHANNELS == 3:
        luma = luma_of(r, g, b, CHANNELS)
        r, g, b = r + share * (luma - r), g + share * (luma - g), b + share * (luma - b)
    if tl.load(row + SIGMA) == 0:
        r, g, b = solarized(r, row), solarized(g, row), solarized(b, row)
    tl.store(target, r, mask=inside)
    if CHANNELS == 3:
        tl.store(target + s_plane, g, mask=inside)
        tl.store(target + 2 * s_plane, b, mask=inside)


@triton.jit
def blurred(
    source, out, rows, planes, size,
    s_view, s_plane, s_y, s_x,
    DOWN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A Gaussian along the rows of `source` or, with DOWN, along its columns, for the views that are blurred."""
    program, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    view, plane = program // planes, program % planes
    row = rows + view * NUMBERS
    sigma = tl.load(row + SIGMA)
    if sigma > 0:
        radius = tl.load(row + RADIUS).to(tl.int32)
        place = block * BLOCK + tl.arange(0, BLOCK)
        inside = place < size * size
        y, x = place // size, place % size
        base = view * s_view + plane * s_plane
        value = tl.zeros((BLOCK,), tl.float32)
        total = 0.0
        for tap in range(-radius, radius + 1):
            distance = tap / tl.maximum(sigma, 1e-3)
            weight = tl.exp(-0.5 * distance * distance)
            along = size - 1 - tl.abs(size - 1 - tl.abs((y if DOWN else x) + tap))
            pixel = along * s_y + x * s_x if DOWN else y * s_y + along * s_x
            value += weight * tl.load(source + base + pixel, mask=inside, other=0.0)
            total += weight
        value /= total
        if DOWN:
            value = solarized(value, row)
        tl.store(out + base + y * s_y + x * s_x, value, mask=inside)
