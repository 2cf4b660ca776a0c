package alchemist.spark;

import java.io.IOException;
import java.util.Locale;
import org.apache.spark.sql.catalyst.expressions.SpecializedGetters;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.unsafe.Platform;

/**
 * The dtypes of Spark's columns (matrices have none of INT8 and INT16), and how a value of Spark is
 * stored without loss.
 */
enum Element {
    BOOL(1, DataTypes.BooleanType), INT8(1, DataTypes.ByteType), INT16(2, DataTypes.ShortType),
    INT32(4, DataTypes.IntegerType), INT64(8, DataTypes.LongType),
    FLOAT32(4, DataTypes.FloatType), FLOAT64(8, DataTypes.DoubleType);

    final int nbytes;
    final DataType type;

    Element(int nbytes, DataType type) {
        this.nbytes = nbytes;
        this.type = type;
    }

    static Element of(String dtype) {
        return valueOf(dtype.toUpperCase(Locale.ROOT));
    }

    /** Store a field of a row, or an element of an array, which is a {@code from} there. */
    void store(
            byte[] block, int at, SpecializedGetters row, int field, Element from, String column)
            throws IOException {
        switch (from) {
            case BOOL:
                store(block, at, row.getBoolean(field) ? 1L : 0L, column);
                break;
            case INT8:
                store(block, at, (long) row.getByte(field), column);
                break;
            case INT16:
                store(block, at, (long) row.getShort(field), column);
                break;
            case INT32:
                store(block, at, (long) row.getInt(field), column);
                break;
            case INT64:
                store(block, at, row.getLong(field), column);
                break;
            case FLOAT32:
                store(block, at, (double) row.getFloat(field), column);
                break;
            default:
                store(block, at, row.getDouble(field), column);
        }
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
