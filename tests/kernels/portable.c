/* rows.c without torch, so that it can be tried as other machines would compile it: products of every format and attention
 * against double precision, and each row alone against the same row among others. Exits with the number of faults. */
#include "rows.c"
#include <stdio.h>

enum { INPUTS = 352, OUTPUTS = 72, MOST = 130, SIZE = 64, POSITIONS = 256, TOKENS = 8 };

static uint32_t seed = 1;
static uint32_t bits(void) { return (seed = seed * 1664525u + 1013904223u) >> 8; }
static float number(void) { return bits() / (float)(1 << 24) - 0.5f; }

static int product_faults(int format, int int8_inputs) {
    static float w[OUTPUTS * INPUTS], x[MOST * INPUTS], kept[MOST * INPUTS], y[MOST * OUTPUTS], alone[OUTPUTS];
    const int counts[] = {1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 16, 97, 130};
    const int blocks = (OUTPUTS + PANEL - 1) / PANEL * (INPUTS / BLOCK), halves = format == Q4_1 ? 2 * PANEL : PANEL;
    const size_t bytes = (size_t)blocks * block_bytes(format);
    uint8_t *data = malloc(bytes);
    for (size_t i = 0; i < bytes; i++) data[i] = bits();
    if (format == FLOAT32)
        for (size_t i = 0; i < bytes / 4; i++) ((float *)data)[i] = number();
    uint16_t *short_numbers = (uint16_t *)data;
    for (size_t i = 0; i < bytes / 2 && format == BFLOAT16; i++) short_numbers[i] = (short_numbers[i] & 0x80ff) | 0x3d00;
    for (size_t i = 0; i < bytes / 2 && format == FLOAT16; i++) short_numbers[i] = (short_numbers[i] & 0x83ff) | 0x2c00;
    for (int b = 0; b < blocks && is_quantized(format); b++)
        for (int i = 0; i < halves; i++) {
            uint16_t *scale = (uint16_t *)(data + b * block_bytes(format)) + i;
            *scale = (*scale & 0x83ff) | 0x2000;
        }
    for (int i = 0; i < MOST * INPUTS; i++) x[i] = number();
    Matrix matrix = {data, 0, format, INPUTS, OUTPUTS, int8_inputs};
    int64_t all_rows[OUTPUTS];
    for (int i = 0; i < OUTPUTS; i++) all_rows[i] = i;
    paceline_rows(&matrix, all_rows, OUTPUTS, w);
    double worst_rounding = 0;
    for (int i = 0; i < MOST * INPUTS && int8_inputs; i += BLOCK) { /* what is left of them, against which sums are held */
        static int8_t integers[BLOCK];
        float scale, total;
        int32_t sum;
        rounded(x + i, BLOCK, 1, integers, &scale, &total, &sum);
        for (int k = 0; k < BLOCK; k++) {
            kept[i + k] = scale * integers[k];
            const double step = fabs(kept[i + k] - x[i + k]) / scale;
            if (step > worst_rounding) worst_rounding = step; /* with fmax, gcc 12 for Arm ends in an error of its own */
        }
    }
    double worst = 0, largest = 0;
    int variant = 0;
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        paceline_product(&matrix, x, counts[c], y, 2);
        for (int r = 0; r < counts[c]; r++) {
            paceline_product(&matrix, x + r * INPUTS, 1, alone, 1);
            variant |= memcmp(alone, y + r * OUTPUTS, sizeof alone) != 0;
            for (int o = 0; o < OUTPUTS; o++) {
                double sum = 0;
                for (int k = 0; k < INPUTS; k++) sum += (double)w[o * INPUTS + k] * (int8_inputs ? kept : x)[r * INPUTS + k];
                worst = fmax(worst, fabs(sum - y[r * OUTPUTS + o]));
                largest = fmax(largest, fabs(sum));
            }
        }
    }
    free(data);
    printf("format %d%s: error %.1e of the largest, rows %s\n", format, int8_inputs ? " int8" : "", worst / largest,
           variant ? "vary" : "alike");
    return variant + !(worst < 3e-6 * largest) + !(worst_rounding < 0.5001);
}

static int attention_faults(int window) {
    static float keys[POSITIONS * SIZE], values[POSITIONS * SIZE], q[TOKENS * SIZE], out[TOKENS * SIZE], alone[SIZE];
    for (int i = 0; i < POSITIONS * SIZE; i++) keys[i] = number(), values[i] = number();
    for (int i = 0; i < TOKENS * SIZE; i++) q[i] = 4 * number();
    const Attention attention = {.head_dim = SIZE, .scale = 0.125f};
    const Cache cache = {keys, values, POSITIONS, 0};
    double worst = 0;
    int variant = 0;
    attend(&attention, &cache, 0, q, out, SIZE, 100, TOKENS, window);
    for (int t = 0; t < TOKENS; t++) {
        attend(&attention, &cache, 0, q + t * SIZE, alone, SIZE, 100 + t, 1, window);
        variant |= memcmp(alone, out + t * SIZE, sizeof alone) != 0;
        double weights[POSITIONS], sum = 0;
        const int first = window && 101 + t > window ? 101 + t - window : 0;
        for (int p = first; p <= 100 + t; p++) {
            weights[p] = 0;
            for (int d = 0; d < SIZE; d++) weights[p] += 0.125 * q[t * SIZE + d] * keys[p * SIZE + d];
            sum += weights[p] = exp(weights[p]);
        }
        for (int d = 0; d < SIZE; d++) {
            double value = 0;
            for (int p = first; p <= 100 + t; p++) value += weights[p] / sum * values[p * SIZE + d];
            worst = fmax(worst, fabs(value - out[t * SIZE + d]));
        }
    }
    printf("window %d: error %.1e, rows %s\n", window, worst, variant ? "vary" : "alike");
    return variant + !(worst < 1e-6);
}

int main(void) {
    int faults = 0;
    for (int format = FLOAT32; format <= Q4_1; format++) faults += product_faults(format, 0);
    for (int format = Q8_0; format <= Q4_1; format++) faults += product_faults(format, 1);
    for (int window = 0; window < 80; window += 37) faults += attention_faults(window);
    return faults;
}
