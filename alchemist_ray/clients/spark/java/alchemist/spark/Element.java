package alchemist.spark;

import java.io.IOException;
import java.util.Locale;
import org.apache.spark.unsafe.Platform;

/** The dtypes of matrices, and how a value of Spark is stored as one without loss. */
enum Element {
    BOOL(1), INT32(4), INT64(8), FLOAT32(4), FLOAT64(8);

    final int nbytes;

    Element(int nbytes) {
        this.nbytes = nbytes;
    }

    static Element of(String dtype) {
        return valueOf(dtype.toUpperCase(Locale.ROOT));
    }

    void store(byte[] block, int at, double value, String column) throws IOException {
        switch (this) {
            case FLOAT64:
                Platform.putDouble(block, Block.BASE + at, value);
                break;
            case FLOAT32:
                float rounded = (float) value;
                if (Float.isInfinite(rounded) && !Double.isInfinite(value)) {
                    throw outOfRange(Double.toString(value), column);
                }
                Platform.putFloat(block, Block.BASE + at, rounded);
                break;
            default:
                long whole = (long) value;
                if (whole != value || value == 0x1p63) {
                    throw outOfRange(Double.toString(value), column);
                }
                store(block, at, whole, column);
        }
    }

    void store(byte[] block, int at, long value, String column) throws IOException {
        switch (this) {
            case INT64:
                Platform.putLong(block, Block.BASE + at, value);
                break;
            case INT32:
                if (value != (int) value) {
                    throw outOfRange(Long.toString(value), column);
                }
                Platform.putInt(block, Block.BASE + at, (int) value);
                break;
            case BOOL:
                Platform.putByte(block, Block.BASE + at, (byte) (value != 0 ? 1 : 0));
                break;
            default:
                store(block, at, (double) value, column);
        }
    }

    /** Copy elements to doubles. */
    void load(byte[] block, int at, double[] into) {
        long from = Block.BASE + at;
        if (this == FLOAT64) {
            Platform.copyMemory(
                    block, from, into, Platform.DOUBLE_ARRAY_OFFSET, 8L * into.length);
            return;
        }
        for (int k = 0; k < into.length; k++, from += nbytes) {
            into[k] = load(block, from);
        }
    }

    private double load(byte[] block, long from) {
        switch (this) {
            case BOOL: return Platform.getByte(block, from);
            case INT32: return Platform.getInt(block, from);
            case INT64: return Platform.getLong(block, from);
            case FLOAT32: return Platform.getFloat(block, from);
            default: return Platform.getDouble(block, from);
        }
    }

    /** Copy doubles to elements, without loss. */
    void store(byte[] block, int at, double[] values, String column) throws IOException {
        if (this == FLOAT64) {
            Platform.copyMemory(
                    values, Platform.DOUBLE_ARRAY_OFFSET,
                    block, Block.BASE + at, 8L * values.length);
            return;
        }
        for (int k = 0; k < values.length; k++) {
            store(block, at + k * nbytes, values[k], column);
        }
    }

    private Failure outOfRange(String value, String column) {
        String name = name().toLowerCase(Locale.ROOT);
        return new Failure(
                "DtypeError",
                "column '" + column + "' has the value " + value + ", which " + name
                        + " cannot represent: send it with another dtype, or convert it first");
    }
}
